"""A profile small enough to add up by hand, and every way in which one can be wrong."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from gpu_profiles import DENSE, META, attention, write_profile
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.simulation.costs.profiled import ProfiledCosts
from firsttoken.simulation.hardware import Hardware
from firsttoken.study.errors import CorpusError, ProfileError


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile of a GPU that decodes 8 at once alone, and never beside a prompt."""
    write_profile(tmp_path)
    return tmp_path


def step_us(prefill: tuple[int, int] | None, contexts: list[int], layers: int = 2) -> float:
    """What a step costs by the formulas above, on the points of the grid."""
    cached, new = prefill or (0, 0)
    tokens, sequences = new + len(contexts), len(contexts) + bool(prefill)
    dense = (DENSE["embedding"] + DENSE["final_layernorm"]) * tokens
    dense += layers * (2 * DENSE["layernorm"] + DENSE["qkv_proj"]) * tokens
    mean = sum(contexts) / len(contexts) if contexts else 0
    return dense + 120 + 2 * sequences + layers * attention(new, cached, len(contexts), mean)


@pytest.mark.parametrize(
    ("prefill", "contexts"),
    [((0, 16), []), ((0, 40), []), ((16, 64), []), ((40, 16), []), (None, [16]), (None, [40] * 4), ((0, 16), [30, 50])],
)
def test_points_and_lines_between_them(profile: Path, prefill, contexts: list[int]) -> None:
    """Bilinear functions are met exactly, between the points too."""
    costs = ProfiledCosts.read(profile, layers=2)
    assert costs.step_s([prefill] if prefill else [], contexts) == pytest.approx(step_us(prefill, contexts) * 1e-6)


# a second grid: chunks, prefixes, decodes, contexts
FINE = ((0, 24, 36, 54), (0, 32, 48, 56), (0, 1, 2, 4), (0, 32, 48, 56))


def add_a_grid(profile: Path) -> set[tuple[int, ...]]:
    """Add a finer grid to ``attention.csv``; returns its points. Neither grid has a point of both kinds."""
    there = {tuple(map(int, line.split(",")[:4])) for line in (profile / "attention.csv").read_text().split()[1:]}
    more = [
        (c, p, n, k)
        for c, p, n, k in product(*FINE)
        if (c or not p) and (c or n) and bool(n) == bool(k) and (c, p, n, k) not in there
    ]
    with (profile / "attention.csv").open("a") as file:
        file.write("".join(f"\n{c},{p},{n},{k},{attention(c, p, n, k)}" for c, p, n, k in more))
    return set(more)


def test_the_union_of_two_grids(profile: Path) -> None:
    """What was measured is met at every point, and a function that is linear along each axis between them too."""
    points = add_a_grid(profile)
    costs = ProfiledCosts.read(profile, layers=1)
    assert 5 < len(costs.axes[0]) < len(points) < costs.grid.size / 2
    for chunk, prefix, decodes, context in points:
        assert costs._lookup(chunk, prefix, decodes, context) * 1e6 == pytest.approx(
            attention(chunk, prefix, decodes, context)
        )
    rng = random.Random(0)
    for _ in range(300):
        chunk, prefix, context = rng.uniform(16, 64), rng.uniform(16, 64), rng.uniform(16, 64)
        decodes = rng.randint(1, 4)
        assert costs._lookup(chunk, prefix, decodes, context) * 1e6 == pytest.approx(
            attention(chunk, prefix, decodes, context)
        )


def test_a_point_that_is_missing_from_its_own_grid_is_not_made_up(profile: Path) -> None:
    add_a_grid(profile)
    table = profile / "attention.csv"
    kept = [line for line in table.read_text().split() if not line.startswith(("16,64,1,16,", "24,48,1,48,"))]
    table.write_text("\n".join(kept))
    with pytest.raises(CorpusError, match=r"attention.csv: there is no measurement at .*'n_decode': 1"):
        ProfiledCosts.read(profile, layers=1)


def test_a_profile_of_several_degrees_is_read_at_one_gpu(profile: Path) -> None:
    """Keys of its ``meta.yaml`` are whole numbers: the degrees."""
    for degree in ("tp1", "tp2"):
        (profile / degree).mkdir()
        for name in ("attention.csv", "dense.csv", "per_sequence.csv"):
            (profile / degree / name).write_bytes((profile / name).read_bytes())
    for name in ("attention.csv", "dense.csv", "per_sequence.csv"):
        (profile / name).unlink()
    degrees = "  per_tp:\n    1:\n      n_samples: 3\n    2:\n      n_samples: 4\n"
    (profile / "meta.yaml").write_text(
        f"architecture: llama\ntp_degrees: [1, 2]\nskew_fit:\n  enabled: false\n{degrees}"
    )
    one, same = ProfiledCosts.read(profile, 1), ProfiledCosts.read(profile / "tp1", 1)
    assert one.sha256 == same.sha256 and (one.grid == same.grid).all()
    with pytest.raises(CorpusError, match="tp2 is of 2 GPUs; a profile of several GPUs lacks the time of what they"):
        ProfiledCosts.read(profile / "tp2", 1)
    (profile / "tp1" / "moe.csv").write_text("tokens,activated_experts,time_us\n1,8,50.2\n")
    with pytest.raises(CorpusError, match=r"moe.csv: a mixture of experts is not simulated"):
        ProfiledCosts.read(profile, 1)
    shutil.rmtree(profile / "tp1")
    with pytest.raises(CorpusError, match="has tp2 and no tp1; a profile of several GPUs"):
        ProfiledCosts.read(profile, 1)


def test_a_profile_of_the_older_profiler_says_so(profile: Path) -> None:
    (profile / "attention.csv").write_text("prefill_chunk_size,kv_cache_size,batch_size,is_prefill\n32,0,1,True\n")
    with pytest.raises(CorpusError, match=r"attention.csv: an older profiler \(v0\) wrote it"):
        ProfiledCosts.read(profile, 1)


def test_tables_may_lie_in_tp1_and_end_in_lines(profile: Path) -> None:
    (profile / "tp1").mkdir()
    for name in ("attention.csv", "dense.csv", "per_sequence.csv"):
        (profile / name).rename(profile / "tp1" / name)
    costs = ProfiledCosts.read(profile, layers=1)
    assert costs.step_s([], []) == 0
    expected = 19 * 20 + 160 + attention(0, 0, 20, 16)
    assert costs.step_s([], [16] * 20) == pytest.approx(expected * 1e-6), "beyond 8 requests the lines go on"


def test_a_prefill_longer_than_any_has_the_attention_of_its_pieces(profile: Path) -> None:
    """And so have several long ones, which count as one of the same pairs."""
    costs = ProfiledCosts.read(profile, layers=2)
    pieces = [(0, 64), (64, 64), (128, 64), (192, 16)]
    others = step_us((0, 208), [], layers=2) - 2 * attention(208, 0, 0, 0)
    whole = others + 2 * sum(attention(new, cached, 0, 0) for cached, new in pieces)
    assert costs.step_s([(0, 208)], []) == pytest.approx(whole * 1e-6)
    beside = costs.step_s([(0, 208)], [40]) - costs.step_s([(0, 208)], [])
    once = costs.step_s([(192, 16)], [40]) - costs.step_s([(192, 16)], [])
    assert beside == pytest.approx(once), "decodes are beside one piece, not beside each"
    assert costs.step_s([(0, 208), (0, 208)], []) < costs.step_s([(0, 416)], [])


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("cached", [0, 64, 300])
def test_a_table_that_ends_on_a_stair_goes_on_as_it_rose(profile: Path, keyed: bool, cached: int) -> None:
    """A step of twice the tokens is never about as cheap."""
    dense = (profile / "dense.csv").read_text()
    (profile / "dense.csv").write_text(re.sub(r"(\w+),64,(.*)", r"\1,63,\2\n\1,64,\2", dense))
    axes = "attention_grid: {axes: [prefill_key]}\n" if keyed else ""
    (profile / "meta.yaml").write_text(META + axes + "skew_fit: {enabled: false}\n")
    costs = ProfiledCosts.read(profile, layers=2)
    for tokens in (16, 64, 100, 500, 2_000, 9_000):
        once, twice = (costs.step_s([(cached, new)], []) for new in (tokens, 2 * tokens))
        assert twice > 1.4 * once


def test_what_did_not_fit_is_on_the_line_through_what_did(profile: Path) -> None:
    """Eight decodes beside a prompt were not measured: five more than four cost what four more than one do."""
    costs = ProfiledCosts.read(profile, layers=1)
    assert costs.grid[1, 0, 3, 2] * 1e6 == pytest.approx(attention(16, 0, 8, 64))


def test_several_prompts_are_one_of_the_same_pairs(profile: Path) -> None:
    costs = ProfiledCosts.read(profile, layers=1)
    apart, whole = costs.step_s([(0, 32), (32, 32)], []), costs.step_s([(0, 64)], [])
    assert apart - whole == pytest.approx(2e-6), "one more sequence for the head and the sampler"
    assert costs.step_s([(0, 32), (0, 32)], []) < apart


def test_uneven_decodes_lie_between_mean_and_longest(profile: Path) -> None:
    (profile / "meta.yaml").write_text(META + "skew_fit: {enabled: true}\n")
    head = "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples"
    rows = ["0,n<=4,sr<=40%,kvB<=1k,kp=0,0.5,3", "0,n>4,sr>40%,kvB<=1k,kp=0,0.1,1"]
    (profile / "skew_fit.csv").write_text("\n".join([head, *rows]))
    costs = ProfiledCosts.read(profile, layers=1)
    even = costs.step_s([], [28] * 4)
    longest = costs.step_s([], [64] * 4)
    assert costs.step_s([], [16, 16, 16, 64]) == pytest.approx((even + longest) / 2)
    assert costs.skew.otherwise == pytest.approx(0.4)


@settings(max_examples=200, deadline=None)
@given(
    prefills=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000)), max_size=3),
    contexts=st.lists(st.integers(1, 5000), max_size=20),
)
def test_every_step_takes_time_and_more_work_takes_no_less(example_profile: ProfiledCosts, prefills, contexts) -> None:
    seconds = example_profile.step_s(prefills, contexts)
    assert (seconds > 0) == bool(prefills or contexts)
    if contexts:
        assert example_profile.step_s(prefills, [*contexts[:-1], contexts[-1] + 100]) >= seconds - 1e-12


@pytest.fixture(scope="module")
def example_profile(tmp_path_factory: pytest.TempPathFactory) -> ProfiledCosts:
    return ProfiledCosts.read(profile.__wrapped__(tmp_path_factory.mktemp("profile")), layers=2)


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new, 1))


def scatter(folder: Path) -> None:
    """Points of which no two have anything in common: their grid would fill a thousand gigabytes."""
    with (folder / "attention.csv").open("a") as file:
        file.writelines(f"\n{i},{i},{i},{i},1" for i in range(100, 1100))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (edit("attention.csv", "kv_decode", "context"), r"attention.csv: has no column kv_decode; profile it again"),
        (edit("attention.csv", "16,0,1,16,", "16,0,1,17,"), r"attention.csv: there is no measurement at"),
        (edit("attention.csv", "16,0,1,16,9", "16,0,1,16,-9"), r"attention.csv, line \d+: time_us is '-9\S*', it must"),
        (
            edit("attention.csv", "16,0,1,16,", "16,0,0,0,"),
            r"attention.csv, line \d+: the point \(16, 0, 0, 0\) is there",
        ),
        (
            edit("attention.csv", "kv_decode", "n_decode"),
            r"attention.csv: line 1: the column 'n_decode' is there twice",
        ),
        (edit("dense.csv", "qkv_proj,8,", "qkv_proj,8,1,"), r"dense.csv: line \d+: it has 4 fields and the header 3"),
        (scatter, r"attention.csv: its 1,\d{3} points lie on no grid, one of [\d,]{17} would hold them"),
        (edit("dense.csv", "qkv_proj,8,", "qkv_proj,1,"), r"dense.csv, line \d+: qkv_proj at 1 tokens is out of order"),
        (edit("dense.csv", "qkv_proj,8,80.0", "qkv_proj,8,fast"), r"dense.csv, line \d+: time_us is 'fast'"),
        (edit("per_sequence.csv", "lm_head,8,108", "lm_head,8,nan"), r"per_sequence.csv, line 3: time_us is 'nan'"),
        (
            lambda folder: (folder / "dense.csv").write_text("layer,tokens,time_us\n"),
            r"dense.csv: holds no measurement",
        ),
        (lambda folder: (folder / "dense.csv").unlink(), r"dense.csv cannot be read"),
        (lambda folder: (folder / "meta.yaml").write_text("- 1"), r"meta.yaml: expected a mapping"),
        (lambda folder: (folder / "meta.yaml").write_text("skew_fit: yes\n"), r"meta.yaml: skew_fit: expected"),
        (lambda folder: (folder / "meta.yaml").write_text("attention_grid: [1]\n"), r"meta.yaml: attention_grid: "),
        (edit("meta.yaml", "llama", "qwen3_5"), r"architecture: the layers of 'qwen3_5' are not known; known: llama, "),
        (
            edit("meta.yaml", "[1]", "[1, 2]"),
            r"tp_degrees: the tables may be of more than one GPU; put those of one into",
        ),
        (edit("meta.yaml", "[1]", "[2]"), r"tp_degrees: the tables may be of more than one GPU"),
        (
            edit("dense.csv", "gate_up_proj,1,", "router,1,"),
            r"dense.csv: router is not known; take a profile of a dense",
        ),
        (
            lambda folder: (folder / "dense.csv").write_text(
                "\n".join(row for row in (folder / "dense.csv").read_text().split() if "_proj" not in row)
            ),
            r"dense.csv: \w+_proj lacks; take a profile of a dense model of full attention",
        ),
        (lambda folder: (folder / "layers.csv").touch(), r"layers.csv: an older profiler \(v0\) wrote it"),
        (lambda folder: (folder / "mlp.csv").touch(), r"mlp.csv: a profile of vidur is not read"),
        (lambda folder: (folder / "linear_attention.csv").touch(), r"linear attention is not simulated"),
        (
            lambda folder: (folder / "attention.csv").write_bytes(b"\xff\xfe"),
            r"attention.csv: it is UTF-16 text",
        ),
    ],
)
def test_profiles_that_cannot_be_used(profile: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(profile)
    with pytest.raises(CorpusError, match=message) as caught:
        ProfiledCosts.read(profile, layers=1)
    assert "\n" not in str(caught.value)


def test_buckets_that_cannot_be_read(profile: Path) -> None:
    (profile / "meta.yaml").write_text(META + "skew_fit: {enabled: true}\n")
    head = "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples"
    (profile / "skew_fit.csv").write_text(f"{head}\n0,many,sr<=40%,kvB<=1k,kp=0,0.5,3")
    with pytest.raises(CorpusError, match=r"skew_fit.csv, line 2: 'many' is no bucket such as n<=128"):
        ProfiledCosts.read(profile, layers=1)


def test_a_share_of_several_gpus_is_read_where_the_caller_adds_what_they_exchange(profile: Path) -> None:
    edit("meta.yaml", "[1]", "[1, 2]")(profile)
    assert ProfiledCosts.read(profile, 1, gpus=2).step_s([], [16]) > 0
    with pytest.raises(ProfileError, match=r"-tp2 is one GPU's share, and what the GPUs exchange is in no profile"):
        Hardware("rtx-pro-6000-qwen3-32b-tp2", 32, 1024, layers=64, blocks=20_000).read()


def test_layers_and_swaps_that_a_profile_has_not(profile: Path) -> None:
    with pytest.raises(ProfileError, match="at least 1 layer, not 0"):
        ProfiledCosts.read(profile, layers=0)
    with pytest.raises(ProfileError, match="no profile holds the price of a swap; preempt by recompute"):
        ProfiledCosts.read(profile, layers=1).swap_s(10)
