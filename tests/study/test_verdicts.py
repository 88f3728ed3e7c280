"""Verdicts by interval, and what is said of a claim that was changed after the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from entries import entry

from firsttoken_studies.record.record_log import ClaimRecord, Log, LogLine, forms, rows_digest, run_line
from firsttoken_studies.record.verdicts import Verdict, judge, judge_all, judge_record, show, unjudgeable

R, T, F, CONTRADICTED, DIFFERS, FEW, N, ELSEWHERE = Verdict

LOSS = {"kind": "ratio", "value": -20.0, "tolerance": 0.25, "no_effect": 0.0}
GAIN = {"kind": "ratio", "value": 2.0, "unit": "x", "tolerance": 0.1, "no_effect": 1.0}
SHARE = {"kind": "ratio", "value": 50.0, "unit": "% of own", "tolerance": 0.25, "no_effect": 0.0}
LIMIT = {"kind": "bound", "value": 3.0, "op": "<="}
LEAST = {"kind": "bound", "value": 3.0, "op": ">="}


@pytest.mark.parametrize(
    ("changes", "measured", "verdict"),
    [
        ({}, {"value": 25}, R),
        ({"tolerance": 0.3}, {"value": 25.3}, R),
        ({"tolerance": 0.3}, {"value": 25.4}, F),
        ({"value": "21-28"}, {"value": "21-28"}, R),
        ({"value": "21-28"}, {"value": "20-27"}, F),
        ({"value": True}, {"value": True}, R),
        ({"value": True}, {"value": 1}, F),
        (LOSS, {"value": -16}, R),
        (LOSS, {"value": -16, "low": -17, "high": -15}, R),
        (LOSS, {"value": -16, "low": -30, "high": -1}, T),  # the value is within the tolerance, its interval is not
        (LOSS, {"value": -16, "low": -30, "high": 1}, F),  # within the tolerance, and maybe nothing at all
        (LOSS, {"value": -11}, T),
        (LOSS, {"value": -11, "low": -12, "high": 1}, F),
        (LOSS, {"value": -9.9}, F),  # less than half of the effect
        (LOSS, {"value": -40}, T),
        (LOSS, {"value": -41}, F),
        (LOSS, {"value": 3}, F),
        (GAIN | {"tolerance": 0.5}, {"value": 1.7}, T),  # no ratio has more than a quarter
        (SHARE, {"value": 60}, R),
        (SHARE, {"value": 74}, T),
        (SHARE, {"value": 98.8}, F),  # of the half that is to be left it leaves a fortieth
        (GAIN, {"value": 1.91}, R),
        (GAIN, {"value": 1.85}, T),  # the tolerance is a share of the effect, which is 1
        (GAIN, {"value": 1.03}, F),
        (GAIN, {"value": 0.9}, F),
        (LIMIT, {"value": 2, "low": 1, "high": 3}, R),
        (LIMIT, {"value": 2, "low": 1, "high": 4}, T),
        (LIMIT, {"value": 3.5, "low": 2, "high": 4}, T),
        (LIMIT, {"value": 3.5, "low": 3.1, "high": 4}, F),
        (LEAST, {"value": 4}, R),
        (LEAST, {"value": 4, "low": 2, "high": 5}, T),
        (LEAST, {"value": 2}, F),
        (LEAST | {"no_effect": 1.0}, {"value": 2, "low": 1.5, "high": 2.5}, T),
        (LEAST | {"no_effect": 1.0}, {"value": 2, "low": 0.5, "high": 2.5}, F),
        (LEAST | {"no_effect": 1.0}, {"value": 1.9, "low": 1.5, "high": 2.5}, F),
        (LEAST, {"value": 4, "n": 5}, R),
        (LEAST, {"value": 4, "n": 4}, FEW),  # whatever it says
        (LEAST, {"value": 2, "n": 1}, FEW),
        (LEAST | {"nature": "arithmetic"}, {"value": 4, "n": 1}, R),
        (LEAST | {"nature": "configuration"}, {"value": 4, "n": 1}, R),
    ],
)
def test_verdicts_on_one_measure(claim, make_result, changes: dict, measured: dict, verdict: Verdict) -> None:
    judged = judge(claim(**changes), make_result(summary=[entry(**measured)]))
    assert judged.verdict == verdict, judged.why


@pytest.mark.parametrize(
    ("entries", "verdict"),
    [
        ([(1,), (2,), (3,)], R),
        ([(1, 0, 1.4), (2, 1.5, 2.5), (3, 2.6, 4)], R),
        ([(1, 0, 1.6), (2, 1.5, 2.5), (3, 2.6, 4)], T),
        ([(1,), (4,), (3,)], F),
        ([(3,), (2,), (1,)], F),
        ([(1,), (1,), (3,)], F),
        ([(1,), (1.05,), (3,)], T),  # a step of less than a tenth
    ],
)
def test_verdicts_on_an_ordering(claim, make_result, entries: list, verdict: Verdict) -> None:
    places = tuple({"policy": name} for name in "abc")
    ordering = claim(kind="ordering", where=places, value=None, told="a < b < c")
    made = [dict(zip(("value", "low", "high"), values, strict=False)) for values in entries]
    summary = [entry("m", where, **values) for where, values in zip(places, made, strict=True)]
    assert judge(ordering, make_result(summary=summary)).verdict == verdict


def test_a_claim_that_was_changed_after_the_run_is_judged_post_hoc(claim, make_result) -> None:
    before, after = claim(value=24, tolerance=0.5), claim(value=24, tolerance=1.0)
    result = make_result(summary=[entry(value=25)], entries={"c": before.digest})
    assert judge(before, result).says == "not reproduced"
    assert judge(after, result).says == "reproduced, post hoc"
    assert judge(before, make_result(summary=[entry(value=25)])).says == "not reproduced, post hoc", "none was kept"


def test_without_a_result_or_measure_nothing_is_claimed(claim, make_result) -> None:
    assert judge(claim(), None).says == "not run here"
    assert judge(claim(), make_result()).why == "the result of machine has no m"
    elsewhere = make_result(summary=[entry("m", {"policy": "swap"}, value=25)])
    assert judge(claim(where={"policy": "recompute"}), elsewhere).why.endswith("has no m (policy recompute)")
    assert judge(claim(where={"policy": "swap"}), elsewhere).verdict == R
    text = judge(claim(kind="bound", op=">="), make_result(summary=[entry(value="many")]))
    assert (text.verdict, text.measured) == (N, "")


def test_only_the_profiles_that_a_claim_names_may_answer(claim, make_result) -> None:
    results = [make_result(profile=name, summary=[entry(value=value)]) for name, value in (("quick", 1), ("full", 25))]
    by_full, by_quick = judge_all([claim(), claim(profiles=("quick",))], results, "test-cpu-2c")
    assert (by_full.verdict, by_quick.verdict) == (R, F)


def test_machines_that_differ_are_both_named(claim, make_result) -> None:
    here = make_result(profile="full", summary=[entry(value=25)], entries={"c": claim().digest})
    there = make_result(profile="full", machine={"slug": "other-cpu-2c", "gpu": None}, summary=[entry(value=1)])
    (found,) = judge_record([claim()], [here, there], here.slug)
    assert found.verdict == DIFFERS
    assert found.measured == "25 on test-cpu-2c: reproduced; 1 on other-cpu-2c: not reproduced, post hoc"


def test_a_gpu_is_a_machine_like_others_and_answers_first_what_a_report_measured(claim, make_result) -> None:
    here = make_result(profile="full", summary=[entry(value=25, n=9)])
    card = make_result(profile="gpu", machine={"slug": "a-card", "gpu": "A Card"}, summary=[entry(value=25, n=5)])
    (found,) = judge_record([claim()], [here, card], here.slug)
    assert (found.measured, found.others) == ("25, n=5 on a-card", "25, n=9 on test-cpu-2c")
    for other in ({"whose": "project"}, {"nature": "arithmetic"}):
        (found,) = judge_record([claim(**other)], [here, card], here.slug)
        assert found.measured == "25, n=9"
    few = replace(card, summary=[entry(value=25, n=4)])
    (found,) = judge_record([claim()], [here, few], here.slug)
    assert found.measured == "25, n=9", "who has too few observations goes behind"
    otherwise = replace(card, summary=[entry(value=1, n=5)])
    (found,) = judge_record([claim()], [here, otherwise], here.slug)
    assert found.verdict == DIFFERS and found.measured.startswith("1, n=5 on a-card: not reproduced")


def test_a_result_that_was_removed_still_counts_for_its_machine(claim, make_result) -> None:
    here = make_result(profile="full", summary=[entry(value=25)])
    gone = make_result(profile="full", machine={"slug": "gone-2c", "gpu": None})
    answer = ClaimRecord(({"value": 1},), *forms(claim()))
    log = Log().followed_by([run_line(gone, {"c": answer}, Log())])
    removal = {"experiment": gone.experiment, "profile": gone.profile, "machine": gone.slug, "started": gone.started}
    for faulty, verdict in ((False, DIFFERS), (True, R)):
        line = LogLine("removal", **removal, rows=rows_digest(gone.rows), reason="moved", faulty=faulty)
        (found,) = judge_record([claim()], [here], here.slug, log.followed_by([line]))
        assert found.verdict == verdict


def test_a_withdrawn_run_answers_as_its_line_says_and_as_the_claim_allows(claim, make_result) -> None:
    def found(asked, *runs, fixed="before"):
        log = Log()
        for run in runs:
            answer = {"c": ClaimRecord(({"value": 25},), *forms(asked), fixed)} if run is runs[0] else {}
            place = {"experiment": run.experiment, "profile": run.profile, "machine": run.slug, "started": run.started}
            removal = LogLine("removal", **place, rows=rows_digest(run.rows), reason="moved")
            log = log.followed_by([run_line(run, answer, log), removal])
        return judge_record([asked], [], "test-cpu-2c", log)[0].says

    gone = make_result(profile="full")
    assert found(claim(), gone) == "reproduced"
    assert found(claim(), gone, fixed="after") == "reproduced, post hoc"
    assert found(claim(), gone, fixed="unknown") == "reproduced, unverifiable"
    assert found(claim(), gone, fixed="other") == "not run here"
    assert found(claim(profiles=("paper",)), gone) == "not run here"
    assert found(claim(), gone, replace(gone, started="2026-02-01T00:00:00+00:00")) == "not run here"


def test_a_sum_that_is_done_again_stays_post_hoc_and_a_live_run_does_not(claim, make_result) -> None:
    first, again = make_result(profile="full"), make_result(profile="full", started="2026-02-01T00:00:00+00:00")
    again = replace(again, summary=[entry(value=25)])

    def found(asked, answers: dict, rows: list) -> str:
        log = Log().followed_by([run_line(replace(first, rows=rows), answers, Log())])
        log = log.followed_by([run_line(again, {"c": ClaimRecord(({"value": 25},), *forms(asked))}, log, "again")])
        return judge(asked, again, log).standing

    for changes, standing in (({"ground": "simulated"}, "post hoc"), ({"nature": "arithmetic"}, "post hoc"), ({}, "")):
        asked = claim(**changes)
        after = ClaimRecord(({"value": 25},), *forms(asked), "after")
        assert found(asked, {"c": after}, []) == standing
        assert found(asked, {}, again.rows) == standing, "the same rows, before there was the claim"
        assert found(asked, {"c": replace(after, entries=({"value": 24},))}, []) == "", "another number"
    assert found(claim(ground="simulated", first_look=True), {}, []) == "post hoc"


def test_what_the_sources_contradict_and_what_counts_elsewhere_says_so(claim, make_result) -> None:
    result = make_result(summary=[entry(value=1)])
    judged = judge(claim(erratum="I20"), result)
    assert (judged.verdict, judged.why) == (CONTRADICTED, "differs by 24 (errata I20)")
    assert judge(claim(erratum="I20"), make_result(summary=[entry(value=25)])).verdict == R
    assert judge(claim(erratum="I20"), make_result(summary=[entry(value=1, n=4)])).verdict == FEW
    judged = judge(claim(counts_as="d"), result)
    assert (judged.verdict, judged.measured, judged.says) == (ELSEWHERE, "1", "counted elsewhere (d)")


def test_no_verdict_stands_on_an_estimate_without_an_interval_or_on_a_number_that_answers_twice(
    claim, make_result
) -> None:
    bare = make_result(profile="full", summary=[entry(value=2.5, n=5)])
    ratio = claim(**GAIN)
    assert unjudgeable([ratio], [bare]) == ["claim c: m of machine on test-cpu-2c has no interval"]
    for changes in ({"ground": "simulated"}, {"nature": "arithmetic"}, {"invariant": True}, {"profiles": ("paper",)}):
        assert not unjudgeable([replace(ratio, **changes)], [bare])
    fine = replace(bare, summary=[entry(value=2.5, low=2, high=3, n=5)])
    assert not unjudgeable([ratio], [fine])
    other = replace(ratio, id="d", value=3.0)
    (fault,) = unjudgeable([ratio, other], [fine])
    assert fault == "claims c and d are answered by one number, 2.5: let one count as the other"
    assert not unjudgeable([ratio, replace(other, counts_as="c")], [fine])
    assert not unjudgeable([ratio, replace(other, whose="project")], [fine])
    for target in ("nobody", "d"):
        (fault,) = unjudgeable([ratio, replace(other, counts_as=target)], [fine])
        assert fault.endswith(f"counts as {target}, which is no claim of its report that counts")


def test_a_claim_whose_words_were_changed_says_so(claim, make_result) -> None:
    result = make_result(summary=[entry(value=25)])
    for fixed, standing in (("before", ""), ("after", "post hoc"), ("other", "post hoc"), ("unknown", "unverifiable")):
        answer = ClaimRecord(({"value": 25},), *forms(claim()), fixed)
        log = Log().followed_by([run_line(result, {"c": answer}, Log())])
        judged = judge(claim(), result, log)
        assert (judged.standing, judged.reworded) == (standing, False)
    assert judge(claim(conditions="on a better day"), result, Log(log.lines)).standing == "unverifiable"
    answer = ClaimRecord(({"value": 25},), *forms(claim()))
    log = Log().followed_by([run_line(result, {"c": answer}, Log())])
    assert judge(claim(conditions="on a better day"), result, log).reworded


def test_what_only_another_machine_recorded_names_it(claim, make_result) -> None:
    here = make_result(experiment="here", summary=[entry(value=1)])
    there = make_result(experiment="there", machine={"slug": "other-cpu-2c", "gpu": None}, summary=[entry(value=25)])
    gpu = make_result(experiment="gpu", machine={"slug": "a-card", "gpu": "A Card"}, summary=[entry(value=25)])
    asked = [claim(experiment=name) for name in ("here", "there", "gpu")]
    found = judge_record(asked, [here, there, gpu], here.slug)
    assert [judged.verdict for judged in found] == [F, R, R]
    assert [judged.measured for judged in found] == ["1", "25 on other-cpu-2c", "25 on a-card"]


def test_a_range_is_called_one_and_a_bound_is_told_from_what_misses_it(claim, make_result) -> None:
    few = {"value": 1.0512, "low": 1.04996, "high": 1.0524, "n": 3, "unit": "x", "range": True}
    limit = claim(kind="bound", op="<=", value=1.05)
    assert judge(limit, make_result(summary=[entry(**few)])).measured == "1.051 x range [1.04996, 1.052], n=3"


@pytest.mark.parametrize(
    ("value", "text"),
    [(25, "25"), (21.05, "21.1"), (0.12345, "0.123"), (1234.5, "1234"), (0.0, "0"), (True, "yes"), (2e-5, "2.00e-05")],
)
def test_numbers_are_shown_short(value, text: str) -> None:
    assert show(value) == text
