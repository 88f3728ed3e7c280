from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.assets.shapes import shape_config
from firsttoken.simulation.costs.published import TABLE_2, PublishedCosts
from firsttoken.study.errors import ProfileError
from firsttoken_studies.cps.assumed_costs import Drift, LinkModel, ScaledCosts
from firsttoken_studies.nb21_swap_or_recompute.figures import LINKS, SHAPES, map_of

COSTS = PublishedCosts(decode_s=0.03)
PAPER = LinkModel(shape_config("qwen2.5-0.5b"), 25e9)


def test_scaled_moves_swaps_and_steps_apart() -> None:
    slow = ScaledCosts(COSTS, swap=4, compute=3)
    assert slow.swap_s(700) == pytest.approx(4 * COSTS.swap_s(700))
    assert slow.recompute_s(700) == pytest.approx(3 * COSTS.recompute_s(700))
    assert slow.step_s([(0, 9)], [1, 2]) == pytest.approx(3 * COSTS.step_s([(0, 9)], [1, 2]))
    assert ScaledCosts(COSTS, swap=4).recompute_s(700) == COSTS.recompute_s(700)
    with pytest.raises(ProfileError, match="above 0"):
        ScaledCosts(COSTS, swap=0)


@given(st.lists(st.floats(0.1, 100), min_size=0, max_size=5, unique=True), st.floats(-1, 200))
@settings(max_examples=60, deadline=None)
def test_the_last_change_before_now_holds(later: list[float], now_s: float) -> None:
    starts = [0.0, *sorted(later)]
    drift = Drift([(start, ScaledCosts(COSTS, swap=1 + place)) for place, start in enumerate(starts)])
    place = max([place for place, start in enumerate(starts) if start <= now_s], default=0)
    assert drift.at(now_s).swap_s(512) == pytest.approx((1 + place) * COSTS.swap_s(512))


@pytest.mark.parametrize(("starts", "message"), [([], "from 0 s"), ([1.0], "from 0 s"), ([0.0, 5.0, 5.0], "after")])
def test_changes_must_start_and_go_on(starts: list[float], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Drift([(start, COSTS) for start in starts])


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: str(row.tokens))
def test_the_arithmetic_is_of_the_size_of_table_2(row) -> None:
    """Prices are those of one line, 1,024 tokens; the others dearer copies and cheaper products are the paper's own."""
    assert PAPER.swap_s(row.tokens) * 1e3 == pytest.approx(row.swap_ms, rel=0.35)
    assert PAPER.recompute_s(row.tokens) * 1e3 == pytest.approx(row.recompute_ms, rel=0.15)


def test_the_papers_own_cell_is_its_own_crossing() -> None:
    found = dict(zip(SHAPES, map_of(coalesced=False), strict=True))["qwen2.5-0.5b"][list(LINKS).index("4.0 x16")]
    assert found.below == "swap" and found.tokens == pytest.approx(927, rel=0.1)


@pytest.mark.parametrize("coalesced", [False, True])
def test_a_faster_link_never_makes_swap_worse(coalesced: bool) -> None:
    for line in map_of(coalesced):
        lengths = [float("inf") if each.tokens is None and each.below == "swap" else each.tokens or 0 for each in line]
        assert lengths == sorted(lengths)
