from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.cps.costs.drift import Drift, scaled
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import ProfileError

COSTS = PublishedCosts(decode_s=0.03)


def test_scaled_moves_swaps_and_steps_apart() -> None:
    slow = scaled(COSTS, swap=4, compute=3)
    assert slow.swap_s(700) == pytest.approx(4 * COSTS.swap_s(700))
    assert slow.recompute_s(700) == pytest.approx(3 * COSTS.recompute_s(700))
    assert slow.step_s([(0, 9)], [1, 2]) == pytest.approx(3 * COSTS.step_s([(0, 9)], [1, 2]))
    assert scaled(COSTS, swap=4).recompute_s(700) == COSTS.recompute_s(700)
    with pytest.raises(ProfileError, match="above 0"):
        scaled(COSTS, swap=0)


@given(st.lists(st.floats(0.1, 100), min_size=0, max_size=5, unique=True), st.floats(-1, 200))
@settings(max_examples=60, deadline=None)
def test_the_last_change_before_now_holds(later: list[float], now_s: float) -> None:
    starts = [0.0, *sorted(later)]
    drift = Drift([(start, scaled(COSTS, swap=1 + place)) for place, start in enumerate(starts)])
    place = max([place for place, start in enumerate(starts) if start <= now_s], default=0)
    assert drift.at(now_s).swap_s(512) == pytest.approx((1 + place) * COSTS.swap_s(512))


@pytest.mark.parametrize(("starts", "message"), [([], "from 0 s"), ([1.0], "from 0 s"), ([0.0, 5.0, 5.0], "after")])
def test_changes_must_start_and_go_on(starts: list[float], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Drift([(start, COSTS) for start in starts])
