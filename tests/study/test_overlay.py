"""A figure shows the reader's run, dark, over the record, pale; where there is one of them it is not pale."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
import pytest

from firsttoken_studies.nb35_a_group_for_this_link import adaptive_group
from firsttoken_studies.nb43_the_cost_of_a_batch import figures as batch_cost_figures
from firsttoken_studies.progressiveserve.coldstart import figures
from firsttoken_studies.record.overlay import PALE, counted, over
from firsttoken_studies.record.results import load_result

DRAWN = {
    "deferral_sweep": figures.trade_off,
    "adaptive_group": adaptive_group.choices,
    "batch_cost": batch_cost_figures.live_costs,
}


def alphas(figure) -> set[float]:
    return {line.get_alpha() for ax in figure.axes for line in ax.lines} - {None}


@pytest.mark.parametrize("experiment", DRAWN)
def test_own_observations_stand_over_the_record(experiment: str) -> None:
    matplotlib.use("Agg")
    recorded = load_result(experiment, "full", machine="any")
    now = replace(recorded, profile="quick", started="later")
    both, alone = DRAWN[experiment](recorded, now), DRAWN[experiment](None, now)
    assert alphas(both) == {PALE, 1.0} and alphas(alone) == {1.0}
    assert both.get_suptitle() == alone.get_suptitle()


def test_own_markers_have_an_edge_where_they_lie_over_the_record(make_result) -> None:
    recorded, now = make_result(profile="full"), make_result()
    assert ["markeredgecolor" in one.outlined for one in over(recorded, now)] == [False, True]
    (alone,) = over(None, now)
    assert alone.outlined == alone.style


def test_a_count_is_told_by_result() -> None:
    recorded = load_result("deferral_sweep", "full", machine="any")
    place = {"variant": "none", "layers": 0}
    now = replace(recorded, profile="quick", started="later")
    assert counted(over(recorded, now), "f1_pct", **place) == "n = 36, yours 36"
    assert counted(over(None, now), "f1_pct", **place) == "n = 36"
