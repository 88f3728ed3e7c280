"""What the cells of a notebook call: changed settings, a mechanism's source, what holds, two runs in a figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.study.errors import MechanismError, ProfileError
from firsttoken.study.summary import Summary
from firsttoken_studies.record import show
from firsttoken_studies.record.overlay import over
from firsttoken_studies.record.results import pick


def test_changed_settings_make_a_profile_of_their_own(capsys) -> None:
    study = show.header("quick", {"replayed.blocks": 256, "replayed.threshold": None})
    assert study.name == "quick-changed" and study.sections["replayed"]["blocks"] == 256
    assert "threshold" not in study.sections["replayed"], "None keeps the value of the profile"
    assert "changed   replayed.blocks = 256\n" in capsys.readouterr().out
    assert show.header("quick", {"replayed.blocks": None}).name == "quick"
    with pytest.raises(ProfileError, match="no section 'replaid'"):
        show.header("quick", {"replaid.blocks": 1})


def test_a_changed_run_answers_only_where_it_is_named(make_result) -> None:
    changed = make_result(profile="quick-changed")
    assert pick([changed], "machine", machine="any") is None
    assert pick([changed], "machine", ["quick-changed"], "any") is changed


def test_a_source_is_shown_without_its_docstrings() -> None:
    code = show.source(Sarathi).data
    assert code.startswith("class Sarathi(Scheduler):\n    name:") and '"""' not in code
    assert "def schedule(self)" in code


@pytest.mark.parametrize("raised", [IndexError("no\nroom"), MechanismError("no room")])
def test_whatever_a_mechanism_raises_is_one_line_that_names_it(raised: Exception) -> None:
    with pytest.raises(MechanismError) as told, show.attempt("the scheduler"):
        raise raised
    assert str(told.value).startswith("the scheduler") and "\n" not in str(told.value)
    assert told.value.__suppress_context__


def test_what_does_not_hold_is_named_after_all_is_said(capsys) -> None:
    show.check("the rule", both_agree=True)
    with pytest.raises(MechanismError, match=r"the rule does not do .*: one is less; two is less$"):
        show.check("the rule", one_is_less=False, both_agree=True, two_is_less=0)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "DOES NOT HOLD: one is less",
        "holds: both agree",
        "DOES NOT HOLD: two is less",
    ]


def test_a_red_line_says_what_was_seen_and_whose_run_it_is(capsys) -> None:
    with pytest.raises(
        MechanismError, match=r"the rule of the cell .*: the gap is short \(at most 6 ms, seen 16 ms\)$"
    ):
        show.check("the rule of the cell", {"short": True}, the_gap_is_short=(False, "at most 6 ms, seen 16 ms"))
    assert capsys.readouterr().out.endswith("the library's: all of this holds\n")
    with pytest.raises(MechanismError, match=r"the library's, beside the rule of the cell, .*: a step is short"):
        show.check("the rule of the cell", {"a_step_is_short": False}, a_step_is_short=(True, "not shown"))


def test_cells_of_a_line_are_the_measures_below_their_heads() -> None:
    found = Summary()
    found.add("ttft_s", {"value": 1.25, "low": 1.0, "high": 1.5}, model="gpt2", variant="staged")
    found.add("usd", {"value": 2.0}, model="gpt2")
    columns = {"TTFT, s": ("ttft_s", 2, {"variant": "staged"}), "USD": ("usd", 1), "lost": ("lost", 0)}
    assert show.cells(found, columns, model="gpt2") == {"TTFT, s": "1.25 [1.00, 1.50]", "USD": "2.0", "lost": ""}


def test_a_figure_draws_the_record_first_and_one_run_once(make_result) -> None:
    now, recorded = make_result(), make_result(profile="full")
    assert [one.own for one in over(recorded, now)] == [False, True]
    assert [(one.own, one.alone) for one in over(None, now)] == [(True, True)]
    assert [one.alone for one in over(replace(now), now)] == [True]
    object.__setattr__(now, "with_mechanism", make_result())
    ringed = over(recorded, now)[2]
    assert (ringed.own, ringed.library) == (True, now) and ringed.who() == "your mechanism"
    assert [round(one.shift, 2) for one in over(recorded, now)] == [-0.26, 0.0, 0.26]
