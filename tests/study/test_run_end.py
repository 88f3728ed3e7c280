"""What a run ends with: forty lines at most, of a hundred characters, that name what the reader's run contradicts."""

from __future__ import annotations

from entries import entry

from firsttoken_studies import ledger
from firsttoken_studies.record.claims_table import WIDTH, OwnRun, run_end

GAIN = {"kind": "ratio", "value": 2.0, "unit": "x", "tolerance": 0.1, "no_effect": 1.0}


def end(claims, recorded, mine) -> list[str]:
    return run_end(claims, recorded, "there", OwnRun("here", "quick", tuple(mine)))


def measured(make_result, value: float, n: int = 5, **where):
    return make_result(summary=[entry(value=value, n=n)], **where)


def test_each_verdict_is_counted_by_report(claim, make_result) -> None:
    lines = end([claim(**GAIN)], [], [measured(make_result, 2.0)])
    (counts,) = (line.split() for line in lines if line.startswith("all"))
    assert counts[1:] == ["1", "0", "0", "0", "0", "0"]
    assert lines[-1] == "No claim that your run could judge contradicts the record or a report."


def test_what_contradicts_the_record_comes_before_what_contradicts_the_report_alone(claim, make_result) -> None:
    there = measured(make_result, 2.0, machine={"slug": "there", "gpu": None})
    lines = end([claim(**GAIN)], [there], [measured(make_result, 0.5)])
    assert "yours 0.5 x, n=5; recorded 2 x, n=5; report 2 x" in lines[-1]


def test_too_few_observations_contradict_nothing(claim, make_result) -> None:
    lines = end([claim(**GAIN)], [], [measured(make_result, 0.5, n=4)])
    assert "contradicts the record or a report" in lines[-1]


def test_a_whole_ledger_fits_a_screen() -> None:
    """As if everything had been measured here, with other outcomes."""
    recorded = ledger.recorded()
    lines = run_end(ledger.claims(), [], ledger.machine(), OwnRun("here", "full", tuple(recorded)))
    assert len(lines) <= 36 and all(len(line) <= WIDTH for line in lines)
    assert sum(line.startswith("    yours ") for line in lines) == 10


def test_a_run_of_some_notebooks_ends_with_their_claims_alone(root) -> None:
    numbers = [claim.notebook for claim in ledger.claims()]
    one = numbers[0]
    lines = ledger.end_of_run("quick", [one])
    (counts,) = (line.split()[1:] for line in lines if line.startswith("all  "))
    assert sum(map(int, counts)) == numbers.count(one) < len(numbers)
    assert ledger.end_of_run("quick", ["00"])[0] == "No claim hangs on what was run."
