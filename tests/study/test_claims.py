from __future__ import annotations

import re
from typing import Any

import pytest

from firsttoken.experiments import EXPERIMENTS
from firsttoken.study import paths
from firsttoken.study.claims import Claim, Verdict, judge, judge_all, load_claims, show
from firsttoken.study.claims_table import (
    BEGIN,
    END,
    Own,
    readme_is_current,
    readme_machine,
    table_for,
    update_readme,
)
from firsttoken.study.errors import ClaimsError

R, T, F, N = Verdict

ENTRY = """\
- id: {id}
  report: progressive
  place: Table 1
  says: it is faster
  kind: {kind}
  value: 2
  unit: x
  tolerance: 0.1
  measure: speedup
  experiment: {experiment}
  notebook: "{notebook}"
  human_min: 1
  compute_min: 2
"""


def claim(**changes: Any) -> Claim:
    fields = {"id": "c", "report": "progressive", "place": "Table 1", "says": "says so", "kind": "exact", "value": 25}
    fields |= {"measure": "m", "experiment": "machine", "notebook": "00", "human_min": 1, "compute_min": 0.5}
    return Claim(**fields | changes)


def entry(**changes: str) -> str:
    return ENTRY.format(**{"id": "a", "kind": "ratio", "experiment": "machine", "notebook": "12"} | changes)


def load(text: str) -> list[Claim]:
    paths.CLAIMS.write_text(text, encoding="utf-8")
    return load_claims(paths.CLAIMS, EXPERIMENTS)


def test_the_committed_claims_load() -> None:
    assert load_claims(paths.CLAIMS, EXPERIMENTS)


def test_an_entry_becomes_a_claim(root) -> None:
    (found,) = load(entry())
    assert (found.id, found.value, found.notebook, found.measures) == ("a", 2.0, "12", ("speedup",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (entry() + entry(), r"claims.yaml:14: claim a: this id is used twice"),
        (entry(experiment="machin"), r"claims.yaml:1: claim a: no experiment 'machin'.*did you mean 'machine'"),
        (entry(kind="guess"), r"claim a: unknown kind 'guess'; known: bound, exact"),
        (entry() + "  colour: red\n", "unknown key 'colour'"),
        (entry().replace("  says: it is faster\n", ""), "missing key 'says'"),
        (entry(notebook="12").replace('"12"', "12"), "key notebook: expected str, not 12"),
        (entry(kind="bound"), 'op must be "<=" or ">="'),
        (entry() + '  op: "<="\n', "op must be .* absent otherwise"),
        (entry(kind="ordering"), "measure must be a list"),
        (entry().replace("0.1", "0"), "tolerance must be positive"),
        (entry().replace("value: 2", "value: two"), "value must be a number"),
        (entry().replace("  value: 2\n", ""), "value must be given"),
        ("a: 1\n", "expected a list"),
        ("- [", "cannot be read"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(root, text: str, message: str) -> None:
    with pytest.raises(ClaimsError, match=message):
        load(text)


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
        ({"kind": "ratio", "value": -20.0, "tolerance": 0.25}, {"value": -16}, R),
        ({"kind": "ratio", "value": -20.0, "tolerance": 0.25}, {"value": -3}, T),
        ({"kind": "ratio", "value": -20.0, "tolerance": 0.25}, {"value": 3}, F),
        ({"kind": "ratio", "value": 2.0, "unit": "x", "tolerance": 0.1}, {"value": 1.4}, T),
        ({"kind": "ratio", "value": 2.0, "unit": "x", "tolerance": 0.1}, {"value": 0.9}, F),
        ({"kind": "bound", "value": 3.0, "op": "<="}, {"value": 2, "low": 1, "high": 3}, R),
        ({"kind": "bound", "value": 3.0, "op": "<="}, {"value": 2, "low": 1, "high": 4}, T),
        ({"kind": "bound", "value": 3.0, "op": "<="}, {"value": 3.5, "low": 2, "high": 4}, F),
        ({"kind": "bound", "value": 3.0, "op": ">="}, {"value": 4}, R),
        ({"kind": "bound", "value": 3.0, "op": ">="}, {"value": 4, "low": 2, "high": 5}, T),
        ({"kind": "bound", "value": 3.0, "op": ">="}, {"value": 2}, F),
    ],
)
def test_verdicts_on_one_measure(make_result, changes: dict, measured: dict, verdict: Verdict) -> None:
    judged = judge(claim(**changes), make_result(summary={"m": measured}))
    assert judged.verdict == verdict, judged.why


@pytest.mark.parametrize(
    ("values", "verdict"), [((1, 2, 3), R), ((1, 4, 3), T), ((3, 2, 1), F), ((1, 1, 3), T), ((2, 1, 2), F)]
)
def test_verdicts_on_an_ordering(make_result, values: tuple, verdict: Verdict) -> None:
    ordering = claim(kind="ordering", measure=("a", "b", "c"), value=None)
    summary = {name: {"value": value} for name, value in zip("abc", values, strict=True)}
    assert judge(ordering, make_result(summary=summary)).verdict == verdict


def test_without_a_result_or_measure_nothing_is_claimed(make_result) -> None:
    assert judge(claim(), None).verdict == N
    assert "has no m" in judge(claim(), make_result()).why
    text = judge(claim(kind="bound", op=">="), make_result(summary={"m": {"value": "many"}}))
    assert (text.verdict, text.measured) == (N, "")


def test_only_the_profiles_that_a_claim_names_may_answer(make_result) -> None:
    results = [
        make_result(profile=name, summary={"m": {"value": value}}) for name, value in (("quick", 1), ("full", 25))
    ]
    by_full, by_quick = judge_all([claim(), claim(profiles=("quick",))], results, "test-cpu-2c")
    assert (by_full.verdict, by_quick.verdict) == (R, F)


RATIO = {"kind": "ratio", "value": 2.0, "unit": "x", "tolerance": 0.1}


def cells(table: str, row: int) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", table.splitlines()[row])[1:-1]]


def test_the_table_shows_the_record_and_a_gpu(make_result) -> None:
    ratio = claim(**RATIO, says="a | b " + "word " * 40)
    here = make_result(summary={"m": {"value": 1.5, "low": 1.25, "high": 1.75, "n": 20, "unit": "x"}})
    there = make_result(summary={"m": {"value": 2.0}}, machine={"slug": "nvidia-x", "gpu": "X"})
    table = table_for([ratio], [here, there], "test-cpu-2c")
    row = table.splitlines()[2]
    assert "a \\| b" in row and len(row) < 250
    expected = ["2 x", "1.5 x [1.25, 1.75], n=20", "2 x (reproduced)", "± 10%", "00", "1 + 0.5", "trend only"]
    assert cells(table, 2)[1:] == expected
    assert "recorded GPU" not in cells(table_for([ratio], [here], "test-cpu-2c"), 0), "an empty column is left out"
    assert table.endswith("Recorded: `test-cpu-2c`, the largest profile that was run there.")


def test_a_readers_values_stand_beside_the_record_and_neither_is_taken_for_the_other(make_result) -> None:
    ratio, other = claim(**RATIO), claim(id="d", **RATIO | {"experiment": "sizes"})
    recorded = [
        make_result(experiment=name, profile="full", summary={"m": {"value": 2.0}}) for name in ("machine", "sizes")
    ]
    mine = make_result(summary={"m": {"value": 0.5}}, machine={"slug": "laptop-avx2-4c", "gpu": None})
    table = table_for([ratio, other], [*recorded, mine], "test-cpu-2c", Own("laptop-avx2-4c", "quick", (mine,)))
    head = cells(table, 0)
    assert head[2:4] == ["yours: laptop-avx2-4c, quick", "recorded"] and head[-2:] == ["yours says", "the record says"]
    first, second = (dict(zip(head, cells(table, row), strict=True)) for row in (2, 3))
    assert [first[key] for key in head[2:4] + head[-2:]] == ["0.5 x", "2 x", "not reproduced", "reproduced"]
    assert [second[key] for key in head[2:4] + head[-2:]] == ["", "2 x", "not run here", "reproduced"]
    same = table_for([ratio], [recorded[0], mine], "test-cpu-2c", Own("test-cpu-2c", "quick", ()))
    assert cells(same, 2)[2:4] == ["", "2 x"], "a machine of the same name, too, has only what it ran itself"


def test_the_readme_holds_the_table(root) -> None:
    readme = root / "README.md"
    with pytest.raises(ClaimsError, match="put the lines"):
        update_readme(readme, "table")
    readme.write_text(f"before\n{BEGIN}\n{END}\nafter\n", encoding="utf-8")
    table = table_for([claim()], [], "test-cpu-2c")
    assert not readme_is_current(readme, table)
    assert readme_machine(readme) is None
    update_readme(readme, table)
    assert readme_is_current(readme, table)
    assert readme_machine(readme) == "test-cpu-2c"
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    update_readme(readme, table)
    assert readme.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(25, "25"), (21.05, "21.1"), (0.12345, "0.123"), (1234.5, "1234"), (0.0, "0"), (True, "yes"), (2e-5, "2.00e-05")],
)
def test_numbers_are_shown_short(value, text: str) -> None:
    assert show(value) == text
