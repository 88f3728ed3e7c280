"""Ways to bend the record, each of which the check must refuse by its own mechanism; an honest recording passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from entries import entry

from firsttoken.study.errors import FirstTokenError
from firsttoken_studies import ledger
from firsttoken_studies.invariants import broken
from firsttoken_studies.record import history
from firsttoken_studies.record.record_log import (
    FIRST,
    RETIRED,
    Log,
    LogLine,
    faults,
    forms,
    parse_log,
    rows_digest,
    run_line,
)
from firsttoken_studies.record.results import Result
from firsttoken_studies.registry import EXPERIMENTS

NEEDS_HISTORY = pytest.mark.skipif(not history.is_here(), reason="this copy has no history: the chain is checked alone")


@pytest.fixture(scope="module")
def record() -> tuple[Log, list[Result]]:
    return ledger.log(), ledger.recorded()


def of(results: list[Result], experiment: str) -> Result:
    return next(result for result in results if result.experiment == experiment)


def in_place(results: list[Result], forged: Result) -> list[Result]:
    return [forged if result.path == forged.path else result for result in results]


def summarised(result: Result) -> Result:
    return replace(result, summary=EXPERIMENTS[result.experiment].summarise(result.rows, result.parameters))


def relogged(log: Log, forged: Result) -> Log:
    """The log written anew with the forged run in the place of the true one, its chain whole."""
    lines = [line for line in log.lines if (line.place, line.started) != (place(forged), forged.started)]
    again = Log().followed_by(lines)
    return again.followed_by([run_line(forged, {}, again, "recorded again")])


def place(result: Result) -> tuple[str, str, str]:
    return result.experiment, result.profile, result.slug


def test_the_record_as_it_is_passes(record) -> None:
    log, results = record
    assert faults(log, results, ledger.claims()) == []
    assert [fault for result in results for fault in broken(result)] == []


@NEEDS_HISTORY
def test_the_record_passes_its_history(record) -> None:
    assert history.faults(record[0], ledger.claims()) == []


def test_times_that_were_made_shorter_break_what_rows_obey(record) -> None:
    """The file, its summary and its line may all be made again: the phases no longer add up."""
    log, results = record
    true = of(results, "cold_start")
    shorter = [
        row | {"ttft_process_s": 0.87 * row["ttft_process_s"]} if row["variant"] == "progressive" else row
        for row in true.rows
    ]
    forged = summarised(replace(true, rows=shorter))
    assert faults(log, in_place(results, forged), ledger.claims()) == [
        f"the rows of cold_start on {true.slug} are not those of its line: measure it again"
    ]
    assert faults(relogged(log, forged), in_place(results, forged), ledger.claims()) == []
    (fault, *_) = broken(forged)
    assert "ttft_process_s is" in fault and "its parts" in fault


@pytest.mark.parametrize(
    ("claim", "bettered"),
    [
        ("cps.cross-point", {"tolerance": 102.4}),
        ("sarathi.capacity", {"conditions": "served live"}),
        ("sarathi.capacity-yi", {"erratum": "I20"}),
        ("sarathi.capacity-yi", {"counts_as": "sarathi.capacity-mistral"}),
        ("droidspeak.prefill-40k", {"first_look": False}),
    ],
)
def test_what_was_bettered_is_a_claim_without_a_line(record, claim: str, bettered: dict) -> None:
    log, results = record
    claims = [replace(one, **bettered) if one.id == claim else one for one in ledger.claims()]
    (fault,) = faults(log, results, claims)
    assert fault.startswith(f"claim {claim} was changed: say why")


def test_a_summary_that_another_processor_adds_up_is_the_same() -> None:
    assert ledger._same(entry(value=0.3, n=5), entry(value=0.1 + 0.2, n=5))
    for other in (entry(value=0.31, n=5), entry(value=0.3, n=6), entry(value=0.3), None):
        assert not ledger._same(entry(value=0.3, n=5), other)


def test_a_claim_that_is_gone_needs_a_line(record) -> None:
    log, results = record
    claims = [one for one in ledger.claims() if one.id != "cps.cross-point"]
    (fault,) = faults(log, results, claims)
    assert fault.startswith("claim cps.cross-point is gone: say why")
    retired = LogLine("edit", claims={"cps.cross-point": RETIRED}, reason="nobody asks")
    assert faults(log.followed_by([retired]), results, claims) == []


@NEEDS_HISTORY
def test_a_tolerance_that_was_widened_is_looked_up_though_its_line_was_made_again(record) -> None:
    log, _ = record
    (wider,) = (replace(one, tolerance=102.4) for one in ledger.claims() if one.id == "cps.cross-point")
    lines = [
        replace(line, claims={wider.id: replace(line.claims[wider.id], asked=forms(wider)[0])})
        for line in log.lines
        if wider.id in line.claims
    ]
    found = [fault for fault in history.faults(Log(lines), [wider]) if wider.id in fault]
    assert found and all("it was fixed 'after'" in fault for fault in found)


def test_a_result_that_was_deleted_is_missed(record) -> None:
    log, results = record
    gone = next(one for one in results if one.experiment == "one_engine" and "avx512" in one.slug)
    (fault,) = faults(log, [one for one in results if one is not gone], ledger.claims())
    assert fault.startswith(f"the result of one_engine on {gone.slug}, begun") and "no line" in fault


def test_a_summary_that_takes_the_median_for_the_worst_is_not_that_of_its_line(record) -> None:
    log, results = record
    true = of(results, "profile_transfer")
    bent = [
        entry | {"value": 2.3, "low": 2.0, "high": 2.6}
        if entry["measure"] == "relative_loss_pct" and entry["where"] == {"items": "half", "across": "worst"}
        else entry
        for entry in true.summary
    ]
    found = faults(log, in_place(results, replace(true, summary=bent)), ledger.claims())
    assert [fault for fault in found if fault.startswith("claim droidspeak.contexts: the summary of")]


@NEEDS_HISTORY
def test_a_revision_that_never_was_is_not_in_the_history(record) -> None:
    log, results = record
    forged = replace(of(results, "throughput"), git_revision="0" * 40, started="2026-11-25T00:00:00+00:00")
    again = relogged(log, forged)
    assert faults(log, in_place(results, forged), []), "the line names another start"
    line = replace(again.lines[-1], claims={"cps.cross-point": next(iter(again.lines[1].claims.values()))})
    found = history.faults(Log([line]), [])
    assert any("names revision 000000000, which is not in the history" in fault for fault in found)


@NEEDS_HISTORY
def test_a_run_that_was_left_out_of_the_log_is_found_in_the_history(record) -> None:
    log, _ = record
    removed = next(line for line in log.lines if line.kind == "removal")
    without = Log().followed_by(line for line in log.lines if line.rows != removed.rows)
    assert any(f"{removed.experiment}.json of commit" in fault for fault in history.faults(without, []))


@pytest.mark.parametrize("at", [0, 40])
def test_a_line_that_was_edited_breaks_the_chain(record, tmp_path, at: int) -> None:
    log, _ = record
    texts = [line.text for line in log.lines]
    texts[at] = texts[at].replace('"profile":"full"', '"profile":"gpu"')
    with pytest.raises(FirstTokenError, match=rf"record.jsonl:{at + 2}: does not follow from the line before it"):
        parse_log("\n".join(texts), tmp_path / "record.jsonl")
    with pytest.raises(FirstTokenError, match=r"record.jsonl:1: .*not laid out as the program writes it"):
        parse_log(log.lines[0].text.replace(",", ", ", 1), tmp_path / "record.jsonl")


def test_an_honest_recording_follows(record) -> None:
    """A run that replaces one has its line with a reason, and the run before stays in the log."""
    log, results = record
    true = of(results, "throughput")
    again = replace(true, started="2026-12-01T00:00:00+00:00", rows=true.rows[:12])
    longer = log.followed_by([run_line(again, {}, log, "recorded on the engine as it is")])
    assert faults(longer, in_place(results, again), ledger.claims()) == []
    assert f"{true.started} {rows_digest(true.rows)}" in longer.gone()
    assert longer.lines[: len(log.lines)] == log.lines and longer.lines[-1].previous == log.head


def test_a_change_needs_a_reason() -> None:
    for line in ({"kind": "removal"}, {"kind": "edit"}, {"kind": "run", "replaces": "one"}):
        with pytest.raises(FirstTokenError, match="needs a reason"):
            LogLine(**line)
    assert LogLine("run").previous == FIRST
