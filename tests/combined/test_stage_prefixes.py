"""What a stage takes of another model's cache: the rules, and the summary of rows that were made by hand."""

from __future__ import annotations

import pytest

from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.study.errors import ProfileError
from firsttoken_studies.combined.five_at_once.stage_prefixes import (
    AS_IT_IS,
    GROUP,
    OWN,
    RULES,
    TO_THE_END,
    StagePrefixesConfig,
    stage_prefixes_summary,
    stage_rows,
)
from firsttoken_studies.record.results import Result

PARAMETERS = {"five_at_once": {"near_tie": 0.5}}


def rows(stage: int, rule: str, ttft_s: float, f1: list[float]) -> list[dict]:
    """One request for each of ``f1``; the first is the whole model's own."""
    return [
        {"request": number, "stage": stage, "rule": rule, "ttft_s": ttft_s, "f1": score, "shortfall": float(number)}
        for number, score in enumerate(f1)
    ]


def test_the_rules_say_what_is_computed_again():
    group = Group(2, 4)
    found = {rule: again(group, 6) for rule, again in RULES.items()}
    assert found == {OWN: None, AS_IT_IS: NOTHING, GROUP: group, TO_THE_END: Group(2, 6)}


def test_a_rule_is_held_against_the_own_prefill_of_its_stage():
    some = rows(1, OWN, 2.0, [0.0, 0.4]) + rows(1, GROUP, 0.5, [0.2, 0.4]) + rows(2, OWN, 1.0, [1.0, 1.0])
    summary = stage_prefixes_summary(list(reversed(some)), PARAMETERS)
    where = {"stage": 1, "method": GROUP}
    assert summary.value("ttft_share", than=OWN, **where) == pytest.approx(0.25)
    assert summary.value("f1_lost", than=OWN, **where) == pytest.approx(-0.1)
    assert summary.value("own_answers_pct", **where) == 50 and summary.value("f1", stage=2, method=OWN) == 1
    assert not summary.get("f1_lost", than=OWN, stage=1, method=OWN)
    made = {"present": [[0], [0, 1]]}
    result = Result("stage_prefixes", "full", PARAMETERS, {}, made, "", [0], "2026", 0.0, {}, some, {}, summary)
    table = list(stage_rows(result))
    assert len(table) == 2 * len(RULES) and table[2]["of own prefill's"].startswith("0.25")


def test_a_run_without_requests_is_refused():
    with pytest.raises(ProfileError, match="stage_prefixes: requests, prefixes and new_tokens must be at least 1"):
        StagePrefixesConfig(requests=0, prefixes=1, new_tokens=1)


def test_a_share_of_f1_needs_enough_that_the_own_prefill_got_right():
    """Ten requests, as draws without any would have no share."""
    where = {"stage": 1, "method": GROUP, "than": OWN}
    for right in (9, 10):
        own = [0.5] * right + [0.0] * 30
        summary = stage_prefixes_summary(rows(1, OWN, 2.0, own) + rows(1, GROUP, 1.0, [0.4] * len(own)), PARAMETERS)
        found = summary.get("f1_kept_pct", **where)
        assert (found is not None) == (right == 10)
    assert found["value"] == pytest.approx(100 * 0.4 / (0.5 / 4)) and found["low"] > 0
