"""The window's bookkeeping on rows that were made by hand; windows themselves run in tests/profiles on tiny shapes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from plain_tokens import generated
from services import tiny_model

from firsttoken.engine.request import Request, Sampling
from firsttoken.simulation.workload.conversations import Conversations
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb61_five_at_once import figures
from firsttoken_studies.nb61_five_at_once.answers import Judge
from firsttoken_studies.nb61_five_at_once.study import (
    ALL,
    ARMS,
    NONE,
    FinishedWindows,
    FiveConfig,
    blocks_of,
    drawn,
    drawn_prefixes,
    five_summary,
    goodput,
    processor_s,
)
from firsttoken_studies.nb61_five_at_once.trial import IDEAS, seen
from firsttoken_studies.record.results import Result

ASKED = {"ttft_s": 1.0, "tbt_s": 0.2, "limit_s": 9.0, "near_tie": 0.5}


def window(arm: str, seed: int, first: list[float | None]) -> dict:
    """Four requests, one a second."""
    return {
        "arm": arm,
        "seed": seed,
        "arrival_s": [0.0, 1.0, 2.0, 4.0],
        "first_s": first,
        "last_s": [None if at is None else at + 1 for at in first],
        "gap_p99_s": [0.1, 0.1, 0.1, None],
        "tbt_p99_s": 0.1,
        "preemptions": [0, 1, 0, 0],
        "same": [True, True, False, True],
        "shortfall": [0.0, 0.1, 0.4, 3.0],
        "f1": [1.0, 1.0, 0.5, 1.0],
        "replica_s": 3.0,
        "neighbour_s": 1.0,
        "loaded_s": 2.0,
    }


SOON, LATE = [0.5, 1.5, 2.5, 4.5], [5.0, 5.5, 2.5, 4.5]
ROWS = [window(arm, seed, SOON if arm == ALL else LATE) for arm in ARMS for seed in range(5)]


@pytest.fixture
def config() -> FiveConfig:
    return load_profile("full").section("five_at_once", FiveConfig)


def test_the_arms_are_none_each_all_and_all_but_each():
    assert len(ARMS) == 12 and ARMS[NONE] == () and ARMS[ALL] == IDEAS
    assert all(len(ARMS[f"only {idea}"]) == 1 and len(ARMS[f"without {idea}"]) == 4 for idea in IDEAS)


def test_goodput_counts_who_is_within_both_objectives():
    assert goodput(window(ALL, 0, SOON), ASKED) == 4 / 4
    assert goodput(window(ALL, 0, LATE), ASKED) == 2 / 4
    assert goodput(window(ALL, 0, [None, 1.5, 2.5, 4.5]), ASKED) == 3 / 4
    assert goodput(window(ALL, 0, SOON) | {"gap_p99_s": [0.3, 0.1, 0.1, None]}, ASKED) == 3 / 4
    late = window(ALL, 0, [0.5, 1.5, 2.5, None])
    assert goodput(late, ASKED | {"ttft_s": 100.0}) == 3 / 4, "a request without a token is not in time"


def test_the_summary_pairs_draws():
    said = five_summary(ROWS, {"five_at_once": ASKED})
    assert said.value("goodput_per_s", variant=ALL) == 1.0
    assert said.value("goodput_above_pct", variant=ALL, than="best single") == pytest.approx(100)
    assert said.value("goodput_lost_per_s", variant=ALL, than="without CPS") == pytest.approx(0.5)
    assert said.value("goodput_lost_per_s", variant=ALL, across="worst") == pytest.approx(0.5)
    assert said.value("first_token_s", variant=NONE) == 5.0 and said.value("processor_s", variant=NONE) == 4.0
    assert said.value("same_tokens_pct", variant=NONE) == said.value("own_answers_pct", variant=NONE) == 75


def test_an_idea_that_costs_more_than_it_brings_is_the_worst():
    rows = [row | {"first_s": SOON} if row["arm"] == "without CPS" else row for row in ROWS]
    better = [row | {"gap_p99_s": [0.3, 0.1, 0.1, None]} if row["arm"] == ALL else row for row in rows]
    assert five_summary(better, {"five_at_once": ASKED}).value("goodput_lost_per_s", variant=ALL, across="worst") < 0


def test_requests_that_said_nothing_are_no_answers():
    row = window(ALL, 0, [0.5, None, None, 4.5])
    row |= {"same": [True, True, True, False], "shortfall": [0.0, 0.0, 0.0, 3.0]}
    said = five_summary([row], {"five_at_once": ASKED})
    assert said.value("same_tokens_pct", variant=ALL) == said.value("own_answers_pct", variant=ALL) == 50


def test_who_is_cut_off_has_waited_to_the_end_of_the_window():
    """A starved request must not pass for a smooth one: neither behind one token nor behind several."""
    done, cut, starved = (Request(n, [1], Sampling(3), 0.0) for n in range(3))
    done.times_s, cut.times_s, starved.times_s = [10.5, 10.6, 10.7], [10.5, 10.6], [10.5]
    said = seen([done, cut, starved, None], 10.0, 5.0)
    assert said["gap_p99_s"][0] == pytest.approx(0.1) and said["gap_p99_s"][3] is None
    assert min(said["gap_p99_s"][1:3]) > 4 and said["tbt_p99_s"] > 4


def test_a_quick_run_has_no_comparison():
    rows = [row for row in ROWS if row["arm"] in (NONE, ALL)]
    assert not five_summary(rows, {"five_at_once": ASKED}).all("goodput_above_pct")


def test_figures_are_drawn_from_a_result_alone():
    summary = five_summary(ROWS, {"five_at_once": ASKED})
    result = Result(
        "five_at_once", "full", {"five_at_once": ASKED}, {"slug": "x"}, {}, "", [0], "2026", 0.0, {}, ROWS, {}, summary
    )
    assert len(figures.course(result).axes) == 2
    assert len(figures.goodput_by_arm(None, result).axes) == len(figures.missed(None, result).axes) == 1
    assert [row["arm"] for row in figures.arm_rows(result)] == list(ARMS)


def texts(*lengths: int) -> Conversations:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Conversations(np.arange(starts[-1]) % 200, starts, np.full(len(lengths), 8))


def test_a_draw_has_the_share_of_stored_prefixes(config):
    several = texts(20, 60, 1100, 1500, 1024, 2000)
    prefixes = drawn_prefixes(several, config, seed=3)
    assert len(prefixes) == config.prefixes and all(len(one) % 16 == 0 for one in prefixes)
    assert all(config.prefix_tokens[0] <= len(one) <= config.prefix_tokens[1] for one in prefixes)
    asked = drawn(several, prefixes, config, seed=3)
    assert sum(one["stored"] for one in asked) == round(config.stored_share * config.requests)
    begin = [any(one["prompt"][: len(prefix)] == prefix for prefix in prefixes) for one in asked]
    assert begin == [one["stored"] for one in asked]
    assert asked == drawn(several, prefixes, config, seed=3) != drawn(several, prefixes, config, seed=4)
    longest = max(-(-(len(one["prompt"]) + one["new_tokens"]) // 16) for one in asked)
    assert blocks_of(asked, config) >= longest


def test_texts_that_are_too_few_are_refused(config):
    with pytest.raises(ProfileError, match="0 conversations are as long as prefix_tokens"):
        drawn_prefixes(texts(20, 60), config, seed=0)
    with pytest.raises(ProfileError, match="no conversation is as short as prompt_tokens"):
        drawn(texts(2000), [[1] * 512], config, seed=0)


def test_answers_are_held_against_the_warm_replicas_and_the_whole_model():
    model, prompt = tiny_model(), [5, 6, 7]
    own = generated(model, prompt, 4).tokens
    wrong = [own[0], (own[1] + 1) % 200, *own[2:]]
    judge = Judge(model, lambda ids: " ".join(map(str, ids)))
    said = judge.of([{"prompt": prompt}] * 3, [own, wrong, own[:2]], [own] * 3)
    assert said["same"] == [True, False, True], "the window was over before the last one's third token"
    assert said["f1"][0] == 1 and said["f1"][1] < 1
    exact, other, part = said["shortfall"]
    assert exact == pytest.approx(0, abs=1e-4) == part and other > 1e-3
    assert judge.shortfall(prompt, []) == 0.0


def test_a_run_that_was_broken_off_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr("firsttoken.study.paths.CACHE", tmp_path)
    first = FinishedWindows("key" * 8)
    first.add({"seed": 0, "arm": ALL, "ended_s": 2.0})
    (file,) = (tmp_path / "five_at_once").iterdir()
    file.write_text(file.read_text() + json.dumps({"seed": 0, "arm": NONE})[:9])  # the process was killed in the middle
    again = FinishedWindows("key" * 8)
    assert again.find(0, ALL)["ended_s"] == 2.0 and again.find(0, NONE) is None
    again.add({"seed": 0, "arm": NONE, "ended_s": 1.0})
    assert FinishedWindows("key" * 8).find(0, NONE)
    again.drop()
    assert not file.exists() and FinishedWindows("other" * 8).find(0, ALL) is None


def test_a_process_that_is_gone_has_used_nothing():
    assert processor_s(2**30) == 0.0
