"""The simulated twin of the windows: what a cold start obeys whatever its costs, and what its summary says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.request import LayerRecompute, Request, Sampling
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb61_five_at_once import simulated
from firsttoken_studies.nb61_five_at_once.simulated import (
    SimulatedConfig,
    SizedCosts,
    card_model,
    rank_correlation,
    simulated_summary,
    stored,
)
from firsttoken_studies.nb61_five_at_once.study import ALL, ARMS, LIVE, NONE, TWIN, FiveConfig
from firsttoken_studies.nb61_five_at_once.trial import (
    BORROWING,
    CHUNKS,
    CROSS_POINT,
    FOREIGN,
    STAGES,
)
from firsttoken_studies.nb61_five_at_once.twin import (
    TwinExecutor,
    TwinModel,
    TwinVersion,
    TwinWindow,
    capacity_of,
    window,
)

DEPTH, BLOCKS = 6, 24
EVERY = frozenset(range(DEPTH))


class Plain(Costs):
    """10 ms a step, 1 ms a new token of a prompt; a swap takes 0.1 ms a token each way."""

    def step_s(self, prefills, contexts):
        return (0.01 + 0.001 * sum(new for _, new in prefills)) if prefills or contexts else 0.0

    def swap_out_s(self, tokens):
        return 1e-4 * tokens

    swap_in_s = swap_out_s


MODEL = TwinModel(
    Plain(),
    lambda rows: 0.002 if rows else 0.0,
    ((40_000_000, EVERY - {3, 4}), (10_000_000, EVERY - {4}), (10_000_000, EVERY)),
    (12_000_000, *[8_000_000] * DEPTH),
    400,
    200,
    0.003,
)


@pytest.fixture(scope="module")
def config() -> FiveConfig:
    live = load_profile("full").section("five_at_once", FiveConfig)
    smaller = {"group_start": 2, "group_end": 4, "edges": (1, 2), "gbit_per_s": 0.24, "prefix_gbit_per_s": 0.01}
    return replace(live, running=6, token_budget=32, limit_s=100.0, **smaller)


def requests(seed: int, count: int = 12) -> list[dict]:
    """Requests of 40 to 119 tokens and answers of 8 to 47, a few of them behind 32 stored tokens."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.3, count)).tolist()
    return [
        {
            "prompt": [1] * int(rng.integers(40, 120)),
            "new_tokens": int(rng.integers(8, 48)),
            "arrival_s": at,
            "stored_tokens": 32 * int(rng.integers(2)),
        }
        for at in arrivals
    ]


def run(config: FiveConfig, ideas: tuple[str, ...], seed: int = 0, **others) -> TwinWindow:
    return window(MODEL, config, ideas, requests(seed), **{"blocks": BLOCKS} | others)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("arm", ARMS)
def test_no_request_is_lost_and_no_token_said_twice(arm, seed, config):
    made = run(config, ARMS[arm], seed)
    for asked, request in zip(requests(seed), made.requests, strict=True):
        assert request is not None and len(request.output) == asked["new_tokens"]
        assert all(low <= high for low, high in pairwise(request.times_s)) and request.times_s[0] >= asked["arrival_s"]
    assert made.engine.pool.free == BLOCKS and not made.engine.busy


def test_a_small_pool_preempts_and_a_swap_gives_the_host_its_blocks_back(config):
    made = run(config, ARMS[ALL], 1)
    assert sum(made.row["preemptions"]) > 0
    assert made.executor._host_free == 4 * BLOCKS


@pytest.mark.parametrize("arm", ["none", "only PETALS", "only ProgressiveServe", "all"])
def test_the_first_token_waits_for_the_bytes_that_it_needs(arm, config):
    second = config.gbit_per_s * 1e9 / 8
    needed = (
        MODEL.parts[0] if BORROWING in ARMS[arm] else MODEL.stages[0][0] if STAGES in ARMS[arm] else sum(MODEL.parts)
    )
    made = run(config, ARMS[arm])
    assert min(made.row["first_s"]) >= needed / second
    assert made.row["loaded_s"] >= sum(MODEL.parts) / second - 1e-4


def test_the_second_link_is_never_over_its_rate(config):
    sent = run(config, ARMS[ALL]).prefixes.sent
    assert sent and all(end <= begin + 1e-12 for (_, end, _), (begin, _, _) in pairwise(sent))
    assert all(size / (end - begin) == pytest.approx(config.prefix_gbit_per_s * 1e9 / 8) for begin, end, size in sent)


def test_a_cached_prefix_is_computed_in_its_group_alone(config):
    """Its two layers of six, and not the prompt: the tokens that are prefilled are those behind it."""
    asked = [{"prompt": [1] * 80, "new_tokens": 4, "arrival_s": 0.0, "stored_tokens": 64}]
    own, taken = (window(MODEL, config, ideas, asked, BLOCKS, 0.0).row["first_s"][0] for ideas in ((), (FOREIGN,)))
    bytes_s = 64 * (MODEL.state_bytes + 4 * MODEL.kv_bytes) * 8 / (config.prefix_gbit_per_s * 1e9)
    assert own == pytest.approx(0.01 + 0.08)
    assert bytes_s < taken < own + bytes_s


def test_without_stored_prefixes_that_idea_is_no_idea(config):
    asked = [one | {"stored_tokens": 0} for one in requests(0)]
    with_it, without = (window(MODEL, config, ideas, asked, BLOCKS).row for ideas in ((FOREIGN, CHUNKS), (CHUNKS,)))
    assert with_it == without


def test_with_room_for_all_how_one_is_preempted_is_no_matter(config):
    assert run(config, (CROSS_POINT,), blocks=500).row == run(config, (), blocks=500).row


def test_over_no_link_stages_and_neighbours_are_no_matter(config):
    whole = run(config, (), gbit_per_s=0.0).row
    assert run(config, (STAGES,), gbit_per_s=0.0).row["first_s"][1:] == pytest.approx(whole["first_s"][1:], rel=0.2)
    assert run(config, (BORROWING,), gbit_per_s=0.0).row == whole


def test_a_negative_control_a_neighbour_behind_a_slow_way_is_no_help(config):
    far = replace(MODEL, hop_s=5.0)
    asked = requests(0)
    near, slow = (window(one, config, (BORROWING,), asked, BLOCKS).row for one in (MODEL, far))
    assert np.mean(slow["first_s"]) > np.mean(near["first_s"]) + 1


def step(executor: TwinExecutor, request: Request, redo: LayerRecompute | None) -> float:
    request.redo = redo
    return executor.seconds([request.chunk()])


def test_a_step_takes_what_its_layers_take():
    executor, request = TwinExecutor(MODEL, BLOCKS), Request(0, [1] * 30, Sampling(4), 0.0)
    body_s = 0.01 + 0.03 - 0.002
    executor.version = TwinVersion(DEPTH, EVERY, DEPTH)
    assert step(executor, request, None) == pytest.approx(body_s + 0.002)
    request.computed = 30
    group = LayerRecompute(range(2, 4), 30)
    assert step(executor, request, group) == pytest.approx(body_s * 2 / 6), "nothing is said, and two of six layers run"
    executor.version = TwinVersion(DEPTH, EVERY - {3, 4}, DEPTH)
    assert step(executor, request, group) == pytest.approx(body_s / 6), "one of the two is not here"
    executor.version = TwinVersion(DEPTH, EVERY, 4)
    assert step(executor, request, group) == pytest.approx(body_s * 2 / 6), "both are here, and nobody is asked"
    assert step(executor, request, None) == pytest.approx(body_s + 0.002 + 0.003)


def test_the_warm_replica_is_the_fastest(config):
    asked = requests(0)
    times = [one["arrival_s"] for one in asked]
    assert capacity_of(MODEL, config, asked) > len(asked) / max(run(config, ARMS[NONE]).row["last_s"])
    assert [one["arrival_s"] for one in asked] == times


def test_steps_over_the_budget_have_prices_of_their_own():
    costs = SizedCosts(Plain(), replace_prices(), 32)
    assert costs.step_s([(0, 32)], []) == Plain().step_s([(0, 32)], [])
    assert costs.step_s([(0, 32)], [9]) == 1.0
    assert costs.swap_in_s(10) == Plain().swap_in_s(10)


def replace_prices() -> Costs:
    class Second(Plain):
        def step_s(self, prefills, contexts):
            return 1.0

    return Second()


def test_a_request_has_the_longest_prefix_that_it_begins_with():
    asked = [{"prompt": [1, 2, 3, 4], "stored": True}, {"prompt": [1, 2, 3, 4], "stored": False}]
    assert [one["stored_tokens"] for one in stored(asked, [[1, 2], [1, 2, 3], [2]])] == [3, 0]


# What the summary says, and what it refuses.


def rows_of(run: str, goodput: dict[str, float], seeds: int = 5) -> list[dict]:
    times = {"first_token_s": 1.0, "ttft_p50_s": 2.0, "ttft_p95_s": 3.0, "tbt_p99_s": 0.1}
    return [
        {"run": run, "arm": arm, "seed": seed, "goodput_per_s": per_s + seed / 100, "preemptions": 1} | times
        for arm, per_s in goodput.items()
        for seed in range(seeds)
    ]


LIVE_GOODPUT = {arm: 1.0 + place / 10 for place, arm in enumerate(ARMS)}
WARM = {"run": TWIN, "arm": "warm", "seed": 0, "capacity_per_s": 1.9, "live_capacity_per_s": 2.0}


def test_the_error_is_told_by_arm_and_in_the_median():
    off = {arm: per_s * (1.2 if arm == ALL else 1.0) for arm, per_s in LIVE_GOODPUT.items()}
    said = simulated_summary([*rows_of(LIVE, LIVE_GOODPUT), *rows_of(TWIN, off), WARM], {})
    where = {"source": TWIN, "than": LIVE}
    assert said.value("goodput_off_pct", variant=ALL, **where) == pytest.approx(100 * 0.32 / 1.62)
    assert said.value("goodput_off_pct", across="median", **where) == pytest.approx(0, abs=1e-9)
    assert said.value("goodput_off_pct", across="worst", **where) == pytest.approx(100 * 0.32 / 1.62)
    assert said.value("capacity_off_pct", **where) == pytest.approx(-5)


@pytest.mark.parametrize("seeds", [1, 2, 5])
@pytest.mark.parametrize("late", [set(), {ALL}, set(ARMS)])
def test_arms_in_which_nothing_was_in_time_have_no_error(late, seeds):
    """On a busy machine no request of a small run may be in time: the summary is written all the same."""
    live = rows_of(LIVE, LIVE_GOODPUT, seeds)
    for row in live:
        if row["arm"] in late and row["seed"] < 2:  # in all draws, or in the first ones
            row["goodput_per_s"] = 0.0
    said = simulated_summary([*live, *rows_of(TWIN, LIVE_GOODPUT, seeds), WARM], {})
    numbers = [entry[key] for entry in said for key in ("value", "low", "high") if key in entry]
    assert np.isfinite(numbers).all()
    told = {entry["where"].get("variant") for entry in said if entry["measure"] == "goodput_off_pct"}
    assert (ALL in told) == (ALL not in late or seeds == 5)
    assert any(entry["measure"] == "ttft_p50_off_pct" for entry in said)


def test_the_order_of_the_arms_is_told():
    turned = dict(zip(ARMS, reversed(LIVE_GOODPUT.values()), strict=True))
    for twin, wanted in ((LIVE_GOODPUT, 1.0), (turned, -1.0)):
        said = simulated_summary([*rows_of(LIVE, LIVE_GOODPUT), *rows_of(TWIN, twin), WARM], {})
        assert said.value("goodput_rank_correlation", source=TWIN, than=LIVE) == pytest.approx(wanted)
    assert rank_correlation(np.array([1.0, 1.0, 2.0]), np.array([3.0, 3.0, 5.0])) == pytest.approx(1.0)
    assert rank_correlation(np.ones(3), np.arange(3.0)) == 0.0


def test_the_card_is_compared_with_its_own_arms():
    rows = [
        *rows_of(LIVE, LIVE_GOODPUT),
        *rows_of(TWIN, LIVE_GOODPUT),
        *rows_of("a100-sxm", {**LIVE_GOODPUT, ALL: 3.0}),
    ]
    said = simulated_summary([*rows, WARM], {})
    above = said.value("goodput_above_pct", variant=ALL, than="best single", machine="a100-sxm", source=TWIN)
    assert above == pytest.approx(100 * (3.02 / 1.52 - 1))
    assert said.value("goodput_lost_per_s", variant=ALL, across="worst", machine="a100-sxm", source=TWIN) > 0


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [("card", "a1000", "a100-sxm"), ("gbit_per_s", 0, "above 0"), ("arms", ["al"], "no arm"), ("seeds", 0, "seeds")],
)
def test_a_setting_that_makes_no_window_is_refused(key, value, word):
    profile = load_profile("quick", **{f"five_simulated.{key}": value})
    live, larger = profile.section("five_at_once", FiveConfig), profile.section("five_simulated", SimulatedConfig)
    with pytest.raises(ProfileError, match=word):
        larger.over(live)
        card_model(larger)


def test_a_result_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(simulated, "load_result", lambda *_, **__: None)
    with pytest.raises(ProfileError, match="swarm_transport; measure that first"):
        simulated.hop_s()


def test_an_unknown_key_is_refused():
    with pytest.raises(ProfileError, match="cards"):
        load_profile("quick", **{"five_simulated.cards": "a100-sxm"}).section("five_simulated", SimulatedConfig)
