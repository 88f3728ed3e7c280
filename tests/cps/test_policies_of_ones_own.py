"""Preemption policies and victims are settings of the replayed experiment: by name, or as a file of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from firsttoken.engine.preemption import Recompute
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb22_cross_point_scheduler.study import (
    ReplayedConfig,
    crosspoint_replayed,
    drawn,
    replayed_summary,
    run_replayed,
)

TINY = {"replayed.short": 2, "replayed.long": 4, "replayed.blocks": 160, "replayed.thresholds": []}
NEVER = """from firsttoken.engine.preemption import Action, PreemptionPolicy


class Never(PreemptionPolicy):
    def choose(self, tokens, now_s):
        return Action.RECOMPUTE
"""


def test_files_run_beside_the_policies_that_are_there(tmp_path: Path) -> None:
    policy, victim = tmp_path / "never.py", tmp_path / "first.py"
    policy.write_text(NEVER)
    victim.write_text("def first(running):\n    return min(running, key=lambda request: request.order)\n")
    own = {"replayed.policies": [str(policy)], "replayed.victim": str(victim)}
    profile = load_profile("quick", **TINY, **own)
    found = crosspoint_replayed(profile)
    (row,) = [row for row in found.rows if row["policy"] == str(policy)]
    load, costs = drawn(profile.section("replayed", ReplayedConfig), 0), PublishedCosts(row["decode_ms"] / 1e3)
    first, last = (
        run_replayed(load, costs, Recompute(), TINY["replayed.blocks"], victim=name)
        for name in ("first_arrived", "last_arrived")
    )
    assert row | first == row and row | last != row, "the same policy and victims, by path and by name"
    summary = replayed_summary(found.rows, profile.parameters())
    assert summary.of("preemptions", policy=str(policy), costs="published")["value"] > 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"replayed.policies": ["swapp"]}, "replayed.policies: no policy 'swapp'; .*swap"),
        ({"replayed.victim": "lats_arrived"}, "no victim choice 'lats_arrived'; .*last_arrived"),
        ({"replayed.policies": ["nowhere.py"]}, r"there is no policy file nowhere\.py"),
        ({"replayed.victim": "nowhere.py"}, r"there is no policy file nowhere\.py"),
    ],
)
def test_policies_that_are_not_there(setting: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        crosspoint_replayed(load_profile("quick", **TINY, **setting))


def test_a_policy_that_answers_wrongly_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(NEVER.replace("Action.RECOMPUTE", "'recompute'"))
    with pytest.raises(
        ProfileError,
        match=r"wrong\.py: choose must return Action\.SWAP, Action\.RECOMPUTE or Action\.BOTH_ENDS, not 'rec",
    ):
        crosspoint_replayed(load_profile("quick", **TINY, **{"replayed.policies": [str(wrong)]}))
