"""The optimum of a small load: no rule is below it, and a weaker bound, which looks at more runs, finds the same."""

from __future__ import annotations

from itertools import product

import pytest

from firsttoken.engine.workload_items import Item
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import ProfileError
from firsttoken_studies.nb24_who_is_preempted import optimum as study
from firsttoken_studies.nb24_who_is_preempted.elsewhere import at_rate, requests_per_s, window
from firsttoken_studies.nb24_who_is_preempted.optimum import OptimumConfig, by_rule, least_worst_tpot_s, pressed
from firsttoken_studies.nb24_who_is_preempted.study import RULES

COSTS = PublishedCosts(decode_s=0.03)
WAYS = ("swap", "recompute", "cross_point")
ORDERS = ("in_order", "any_that_fits", "shortest_first")
CONFIG = OptimumConfig(0, 2, 3, 32, 1, 5000, ("last_arrived",), ("swap",), ("in_order",))
LOADS = [
    [Item(0.0, tokens, answer, (0,) * tokens) for tokens, answer in load]
    for load in (
        [(150, 60), (140, 50), (150, 40)],
        [(100, 150), (180, 90), (120, 60)],
        [(60, 240), (90, 200), (200, 130)],
    )
]


def least_ms(load: list[Item], best_s: float = 1.0, runs: int = 20_000) -> float:
    found_s = least_worst_tpot_s(load, COSTS, CONFIG.blocks, best_s, runs)
    assert found_s is not None
    return 1e3 * found_s


@pytest.mark.parametrize("load", LOADS, ids=["short", "middle", "long"])
def test_no_rule_is_below_the_optimum_and_its_start_changes_nothing(load: list[Item]) -> None:
    rules_s = {rule: by_rule(load, COSTS, CONFIG, rule, 0) for rule in product(RULES, WAYS, ORDERS)}
    assert any(preempted for _, preempted in rules_s.values())
    best_s = min(seconds for seconds, _ in rules_s.values())
    assert least_ms(load) == pytest.approx(least_ms(load, best_s), abs=1e-6)
    assert least_ms(load) <= 1e3 * best_s + 1e-6


def test_a_weaker_bound_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the steps that open answers still need, hardly a run is cut off."""
    exact, bound = [least_ms(load) for load in LOADS], study.worst_tpot_s
    monkeypatch.setattr(study, "worst_tpot_s", lambda requests, now_s, step_s: bound(requests, now_s, 0.0))
    assert [least_ms(load) for load in LOADS] == pytest.approx(exact, abs=1e-6)


def test_states_that_are_told_apart_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is left out because another stood where it stands: each state is its own."""
    exact = [least_ms(load) for load in LOADS[:2]]
    monkeypatch.setattr(study, "_state", lambda scheduler, requests: (object(),))
    assert [least_ms(load) for load in LOADS[:2]] == pytest.approx(exact, abs=1e-6)


def test_a_search_that_does_not_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert least_worst_tpot_s(LOADS[1], COSTS, CONFIG.blocks, 1.0, 3) is None
    monkeypatch.setattr(study, "small_load", lambda seed, config: [Item(0.0, 20, 5, (0,) * 20)])
    with pytest.raises(ProfileError, match="optimum: 0 of 100 loads have as many preemptions"):
        pressed(0, COSTS, CONFIG)


def test_a_window_of_a_trace_keeps_its_gaps_and_comes_at_its_rate() -> None:
    trace = [Item(2.0 * number, 10 + number, 5) for number in range(50)]
    part = window(trace, 20, seed=3)
    assert part[0].arrival_s == 0 and part[-1].arrival_s == 38 and len(part[0].prompt) == part[0].prompt_tokens
    assert part == window(trace, 20, seed=3) != window(trace, 20, seed=5)
    faster = at_rate(part, 4.0)
    assert faster[-1].arrival_s == pytest.approx(20 / 4.0)
    assert requests_per_s(part, COSTS, 64) > 0
    with pytest.raises(ProfileError, match="51 requests of a load that has 50"):
        window(trace, 51, 0)
