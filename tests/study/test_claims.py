from __future__ import annotations

import re

import pytest
from entries import entry as measured

from firsttoken.study import paths
from firsttoken.study.errors import ClaimsError
from firsttoken_studies.record.claims import Claim, claim_files, digests, load_claims
from firsttoken_studies.record.claims_table import OwnRun, table_for
from firsttoken_studies.registry import EXPERIMENTS

ENTRY = """\
- id: {id}
  report: progressive
  place: Table 1
  says: it is faster
  kind: {kind}
  value: 2
  unit: x
  tolerance: 0.1
  no_effect: 1
  measure: speedup
  experiment: {experiment}
  human_min: 1
  compute_min: 2
"""


def entry(**changes: str) -> str:
    return ENTRY.format(**{"id": "a", "kind": "ratio", "experiment": "machine"} | changes)


def load(text: str) -> list[Claim]:
    for path in claim_files(paths.STUDIES):
        path.unlink()
    (paths.STUDIES / "nb12_staged_healing" / "claims.yaml").write_text(text, encoding="utf-8")
    return load_claims(paths.STUDIES, EXPERIMENTS)


def test_the_committed_claims_load() -> None:
    assert load_claims(paths.STUDIES, EXPERIMENTS)


def test_an_id_is_of_one_notebook_alone(root) -> None:
    load(entry())
    (paths.STUDIES / "nb13_cold_start" / "claims.yaml").write_text(entry(), encoding="utf-8")
    with pytest.raises(
        ClaimsError, match=r"nb13_cold_start/claims.yaml:1: claim a: notebook 12 has a claim of this id"
    ):
        load_claims(paths.STUDIES, EXPERIMENTS)


def test_an_entry_becomes_a_claim(root) -> None:
    (found,) = load(entry())
    assert (found.id, found.value, found.notebook, found.measure, found.places) == ("a", 2.0, "12", "speedup", ({},))


def test_a_result_keeps_what_decides_each_claim_that_it_answers(root) -> None:
    (before,) = load(entry())
    assert digests([before], "machine") == {"a": before.digest} and digests([before], "sizes") == {}
    for said, other in (("says: it", "says: this"), ("human_min: 1", "human_min: 9")):
        assert load(entry().replace(said, other))[0].digest == before.digest, "wording decides nothing"
    for said, other in (
        *(("value: 2", "value: 2.1"), ("tolerance: 0.1", "tolerance: 0.2"), ("no_effect: 1", "no_effect: 0")),
        *(("measure: speedup", "measure: speed"), ("experiment: machine", "experiment: sizes"), ("unit: x", "unit: s")),
        ("kind: ratio", "kind: exact"),
        ("measure: speedup", "measure: speedup\n  where: {policy: swap}"),
    ):
        assert load(entry().replace(said, other))[0].digest != before.digest, other


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (entry() + entry(), r"claims.yaml:14: claim a: this id is used twice"),
        (entry(experiment="machin"), r"healing/claims.yaml:1: claim a: no experiment 'machin'.*did you mean 'machine'"),
        (entry(kind="guess"), r"claim a: kind: 'guess' is not known; known: bound, exact"),
        (entry() + "  nature: guessed\n", r"claim a: nature: 'guessed' is not known; known: arithmetic"),
        (entry() + "  whose: nobody\n", r"claim a: whose: 'nobody' is not known; known: project, report"),
        (entry().replace("place: Table 1", "place: ' '"), "claim a: no source"),
        (entry().replace("  no_effect: 1\n", ""), "claim a: no_effect must say what would be measured"),
        (entry().replace("no_effect: 1", "no_effect: 2"), "claim a: no_effect is the value itself"),
        (entry().replace("value: 2", "value: .nan"), r"line 6: \.nan is no finite number"),
        (entry().replace("0.1", ".inf"), r"line 8: \.inf is no finite number"),
        (entry().replace("0.1", "-0.1"), "tolerance: expected 0 or more, not -0.1"),
        (entry().replace("human_min: 1", "human_min: -1"), "human_min: expected 0 or more"),
        (entry() + "  erratum: twenty\n", "erratum: expected a row of errata.md"),
        (entry() + "  first_look: true\n", "claim a: first_look is of sums"),
        (entry() + "  profiles: [huge]\n", r"profiles\[0\]: 'huge' is not known; known: full, gpu"),
        (entry() + "  says: again\n", "line 14: the key 'says' is there twice"),
        (entry() + "  colour: red\n", "unknown key 'colour'"),
        (entry().replace("  says: it is faster\n", ""), "missing key 'says'"),
        (entry() + "  notebook: '12'\n", "claim a: notebook: left out here, as the folder says it"),
        (entry(kind="bound"), 'op must be "<=" or ">="'),
        (entry(kind="bound") + "  op: '<'\n", "op: '<' is not known"),
        (entry() + '  op: "<="\n', "op must be .* absent otherwise"),
        (entry(kind="ordering"), "where must be a list of places for an ordering"),
        (entry() + "  where: [{policy: a}, {policy: b}]\n", "where must be a list of places for an ordering, and one"),
        (entry() + "  where: {policy: [a]}\n", r"where: policy: expected a number, yes or no, or text, not \['a'\]"),
        (entry() + "  where: {polizy: swap}\n", "where: no place 'polizy'.*did you mean 'policy'"),
        (entry().replace("0.1", "0"), "tolerance must be positive"),
        (entry().replace("value: 2", "value: two"), "value must be a number"),
        (entry().replace("  value: 2\n", ""), "value must be given"),
        ("a: 1\n", "expected a list"),
        ("- [", "line 1: it is no YAML"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(root, text: str, message: str) -> None:
    with pytest.raises(ClaimsError, match=message):
        load(text)


RATIO = {"kind": "ratio", "value": 2.0, "unit": "x", "tolerance": 0.1, "no_effect": 1.0}


def cells(table: str, row: int) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", table.splitlines()[row])[1:-1]]


def test_the_table_shows_the_record_and_other_machines(claim, make_result) -> None:
    ratio = claim(**RATIO, says="a | b " + "word " * 40, whose="project")
    kept = {"entries": {"c": ratio.digest}, "profile": "full"}
    here = make_result(summary=[measured(value=1.5, low=1.25, high=1.75, n=20, unit="x")], **kept)
    there = make_result(summary=[measured(value=1.6)], machine={"slug": "nvidia-x", "gpu": "X"}, **kept)
    table = table_for([ratio], [here, there], "test-cpu-2c")
    row = table.splitlines()[2]
    assert "a \\| b" in row
    expected = [
        "2 x",
        "1.5 x [1.25, 1.75], n=20",
        "1.6 x on nvidia-x",
        "± 10% of the effect beyond 1",
        "00",
        "trend only",
    ]
    assert cells(table, 2)[1:] == expected
    assert "other machines" not in cells(table_for([ratio], [here], "test-cpu-2c"), 0), "an empty column is left out"
    assert table.endswith("Recorded: `test-cpu-2c`, the largest profile that was run there.")


def test_a_readers_values_stand_beside_the_record_and_neither_is_taken_for_the_other(claim, make_result) -> None:
    ratio, other = claim(**RATIO), claim(id="d", **RATIO | {"experiment": "sizes"})
    kept = {"entries": {"c": ratio.digest, "d": other.digest}}
    recorded = [
        make_result(experiment=name, profile="full", summary=[measured(value=2.0)], **kept)
        for name in ("machine", "sizes")
    ]
    mine = make_result(summary=[measured(value=0.5)], machine={"slug": "laptop-avx2-4c", "gpu": None}, **kept)
    table = table_for([ratio, other], [*recorded, mine], "test-cpu-2c", OwnRun("laptop-avx2-4c", "quick", (mine,)))
    head = cells(table, 0)
    assert head[2:4] == ["yours: laptop-avx2-4c, quick", "recorded"] and head[-2:] == ["yours says", "the record says"]
    first, second = (dict(zip(head, cells(table, row), strict=True)) for row in (2, 3))
    assert [first[key] for key in head[2:4] + head[-2:]] == ["0.5 x", "2 x", "not reproduced", "reproduced"]
    assert [second[key] for key in head[2:4] + head[-2:]] == ["", "2 x", "not run here", "reproduced"]
    same = table_for([ratio], [recorded[0], mine], "test-cpu-2c", OwnRun("test-cpu-2c", "quick", ()))
    assert cells(same, 2)[2:4] == ["", "2 x"], "a machine of the same name, too, has only what it ran itself"
