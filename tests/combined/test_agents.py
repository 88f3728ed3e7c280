"""The study of agents in turns: what it refuses, and what its summary says of rows that were made by hand.

Whole runs on tiny shapes are in tests/profiles."""

from __future__ import annotations

import pytest

from firsttoken.study.errors import CorpusError
from firsttoken.study.profile import load_profile
from firsttoken_studies.droidspeak.reuse_items import TaskItem
from firsttoken_studies.nb62_agents_in_turns import figures
from firsttoken_studies.nb62_agents_in_turns import study as agents
from firsttoken_studies.nb62_agents_in_turns.study import DROIDSPEAK, FULL, LATER, OWN_CACHE, REUSE, WAYS, AgentsConfig
from firsttoken_studies.record.results import Result

SECONDS = {FULL: 1.0, OWN_CACHE: 0.5, REUSE: 0.2, DROIDSPEAK: 0.4}
SCORES = {FULL: 0.5, REUSE: 0.25, DROIDSPEAK: 0.48}


def turn(way: str, place: int, conversation: int) -> dict:
    seconds = SECONDS[way] if place else SECONDS[FULL]
    row = {"what": "turn", "conversation": conversation, "way": way, "turn": place, "f1": 1.0, "tokens": 8, "taken": 8}
    return row | {"ttft_s": seconds, "kept_s": 0.01, "ended_s": seconds + 1}


ROWS = [turn(way, place, number) for way in WAYS for place in range(3) for number in range(5)]
ROWS += [
    {"what": "at once", "round": n, "way": way, "turns": 6, "took_s": SECONDS[way]} for way in WAYS for n in range(5)
]
ROWS += [{"what": "score", "way": way, "item": n, "score": score} for way, score in SCORES.items() for n in range(5)]
ASKED = {"agents": {"turns": 3}}


@pytest.fixture
def config() -> AgentsConfig:
    return load_profile("full").section("agents", AgentsConfig)


def test_the_first_turn_is_left_out_of_what_is_gained() -> None:
    summary = agents.agents_summary(ROWS, ASKED)
    assert summary.value("ttft_s", method=DROIDSPEAK, case="turn 1") == 1.0
    assert summary.value("ttft_x", method=DROIDSPEAK, than=FULL) == pytest.approx(2.5)
    assert summary.value("ttft_x", method=OWN_CACHE, than=FULL, case=LATER) == pytest.approx(2)
    assert not summary.get("ttft_share", method=OWN_CACHE, than=FULL, case="turn 2")
    assert summary.value("ttft_share", method=DROIDSPEAK, than=FULL, case="turn 2") == pytest.approx(0.4)
    assert summary.value("ended_x", method=OWN_CACHE, than=FULL) == pytest.approx(2 / 1.5)
    assert summary.value("throughput_x", method=DROIDSPEAK, than=FULL) == pytest.approx(2.5)
    assert summary.value("score_kept_pct", method=DROIDSPEAK, than=FULL) == pytest.approx(96)
    assert summary.value("score_kept_pct", method=REUSE, than=FULL) == pytest.approx(50)


def test_without_items_nothing_is_said_of_scores() -> None:
    summary = agents.agents_summary([row for row in ROWS if row["what"] == "turn"], ASKED)
    assert not summary.all("score") and not summary.all("score_kept_pct")


def test_a_figure_and_a_table_are_made_of_a_result_alone() -> None:
    summary = agents.agents_summary(ROWS, ASKED)
    result = Result("agents", "full", ASKED, {"slug": "x"}, {}, "", [0], "2026", 0.0, {}, ROWS, {}, summary)
    assert len(figures.by_turn(None, result).axes) == 2
    assert [row["what is kept"] for row in figures.way_rows(result)] == list(WAYS)


def items(count: int) -> list[TaskItem]:
    return [TaskItem(f"qa-{number}", "qa", "once", "?", ("yes",)) for number in range(count)]


def test_no_question_that_chose_the_group_is_scored(config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The questions are the same behind a text of another length, in another order."""
    monkeypatch.setattr(
        agents, "held_out_items", lambda task, tokenizer, tokens: items(320)[:: 1 if tokens == 320 else -1]
    )
    monkeypatch.setattr(agents, "encode", lambda item, tokenizer: item)
    timed, scored = agents.items_of(config, None)
    chose = {item.id for item in items(config.chosen_items)}
    assert len(timed) == config.conversations and len(scored) == config.items == 184
    assert {item.id for item in timed} <= chose and not {item.id for item in scored} & chose


def test_items_that_are_too_few_are_refused(config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "held_out_items", lambda task, tokenizer, tokens: items(130))
    with pytest.raises(CorpusError, match="qa has 8 held-out items to time and 2 others that have not chosen the grou"):
        agents.items_of(config, None)
