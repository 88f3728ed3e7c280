"""Which plan is chosen, and what is said where none can be."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from firsttoken.__main__ import main
from firsttoken.study.errors import StageError
from firsttoken.study.record import load_result
from firsttoken_extras.bitplanes.plan_spec import LaterLayers, PlanSpec
from firsttoken_extras.bitplanes.planner import (
    CONSIDERED,
    EXACT,
    Sensitivities,
    TextLoss,
    choose,
    recorded_blocks,
    sensitivities,
    worth_it,
)

LOST = {"4 bits": 0.12, "bits": 0.04, "8 bits": 0.001}
SHARES = {"4 bits": 0.25, "bits": 0.35, "8 bits": 0.5, EXACT: 0.7}
BLOCKS = {(1, 2): 0.02, (1, 3): 0.5}
FOUND = Sensitivities(  # of four layers and the ends, which weigh alike and of which the ends matter least
    {split: {layer: share / 5 for layer in (None, 0, 1, 2, 3)} for split, share in SHARES.items()},
    LOST,
    {split: lost / 9 for split, lost in LOST.items()} | {EXACT: 0.0},
    BLOCKS,
)


def by_parts(plan_spec: PlanSpec) -> float:
    return FOUND.planned(plan_spec).lost_pct


def every() -> list[tuple[float, float]]:
    """Share and loss of every mixture, from the numbers above alone."""
    found = []
    for (split, lost), (ends, end), block in product(LOST.items(), FOUND.ends.items(), [(0, 0), *BLOCKS]):
        there = 4 - (block[1] - block[0])
        nats = torch.tensor(lost * there / 4 + end + BLOCKS.get(block, 0.0), dtype=torch.float64)
        found.append((SHARES[split] * there / 5 + SHARES[ends] / 5, 100 * float(nats.expm1())))
    return found


@pytest.mark.parametrize("budget", [0.16, 0.2, 0.24, 0.28, 0.31, 0.36, 0.5, 1.0])
def test_within_a_budget_nothing_loses_less(budget):
    """As if every mixture had been tried; with a bound that holds, the same."""
    chosen = choose(FOUND, by_parts, budget)
    assert chosen.first_share <= budget
    assert chosen.lost_pct == pytest.approx(min(lost for share, lost in every() if share <= budget))
    assert choose(FOUND, by_parts, budget, chosen.lost_pct) == chosen


@pytest.mark.parametrize("bound", [0.2, 1.5, 5.0, 12.0, 40.0, 100.0])
def test_within_a_bound_nothing_is_smaller(bound):
    chosen = choose(FOUND, by_parts, bound=bound)
    assert chosen.lost_pct <= bound
    assert chosen.first_share == pytest.approx(min(share for share, lost in every() if lost <= bound))


def test_bits_of_layers_ends_and_layers_that_wait_are_all_among_them():
    plans = [str(one.plan_spec) for one in worth_it(FOUND)]
    assert {"4 bits, 1:3 later", "4 bits, 1:2 later"} < set(plans)
    assert any(", ends " in plan and "later" not in plan for plan in plans) and "8 bits, ends lossless" in plans


def test_where_losses_do_not_add_up_what_is_measured_decides():
    def measured(plan_spec: PlanSpec) -> float:
        return by_parts(plan_spec) + (50 if plan_spec.later else 0)

    assert choose(FOUND, by_parts, bound=6.0).plan_spec.later
    assert not choose(FOUND, measured, bound=6.0).plan_spec.later
    with pytest.raises(StageError, match=r"loses 1 % of perplexity or less: '.* later.*' loses least, 6"):
        choose(FOUND, measured, budget=0.2, bound=1.0)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"budget": 0.1}, r"no first stage comes to 0.1 of the bytes: the least is '4 bits, 1:3 later' with 0.150"),
        ({"bound": 0.01}, "loses 0.01 % of perplexity or less: '8 bits, ends lossless' loses least, 0.1 %"),
        ({"budget": 0.3, "bound": 1.0}, "loses 1 % of perplexity or less: '.*' loses least, "),
    ],
)
def test_a_plan_beyond_its_budget(told, words):
    with pytest.raises(StageError, match=words):
        choose(FOUND, by_parts, **told)


def test_more_bits_are_more_bytes_and_parts_lose_less_than_the_whole(make_model):
    model = make_model("llama", layers=2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    windows = torch.randint(1, 100, (4, 24), generator=torch.Generator().manual_seed(1))
    text, found = sensitivities(TextLoss(model, windows, "BF16"), {(1, 2): 0.3})
    assert set(found.layers) == set(CONSIDERED) and set(found.ends) == {*CONSIDERED, EXACT}
    shares = [sum(found.shares[split].values()) for split in ("4 bits", "6 bits", "8 bits")]
    assert shares == sorted(shares) and shares[-1] < 1
    assert abs(found.layers["8 bits"]) < abs(found.layers["4 bits"])
    assert text.nats(PlanSpec(EXACT)) == pytest.approx(0, abs=1e-6)
    plan_spec = PlanSpec("6 bits", (LaterLayers(1, 2),), EXACT)
    expected = sum(found.shares[split][layer] for split, layer in (("6 bits", 0), (EXACT, None)))
    assert found.planned(plan_spec).first_share == pytest.approx(expected)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters()), "left as it was"


def test_layers_that_wait_are_judged_as_they_were_recorded_with_the_same_weights():
    pins = load_result("deferral_sweep", machine="any").provenance
    found = recorded_blocks(SimpleNamespace(provenance=pins))
    assert all(0 <= first < end <= 30 for first, end in found) and min(found.values()) > 0
    assert found[9, 19] > found[13, 15], "more layers, more lost"
    assert recorded_blocks(SimpleNamespace(provenance=pins | {"sha256": "0" * 64})) == {}


def test_the_command_line_measures_which_plan(tmp_path, capsys):
    """A random model has no text that it knows; it is told so before anything is written."""
    for options, words in (
        (["--planes", "bits", "--budget", "0.4"], "--budget and --most-lost choose a plan: add --planes auto"),
        (["--planes", "auto"], "--planes auto needs --budget SHARE, such as 0.36, or --most-lost PERCENT"),
        (["--planes", "auto", "--budget", "0.4", "--set", "model=random:tiny-6"], "random weights say nothing of text"),
    ):
        assert main(["stage", str(tmp_path / "staged"), *options]) == 2
        assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "staged").exists()
    with pytest.raises(SystemExit):
        main(["stage", str(tmp_path / "staged"), "--planes", "auto", "--budget", "1.5"])
