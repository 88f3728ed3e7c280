"""The index of the reports' figures names what exists, and says of the rest why it does not."""

from __future__ import annotations

import re

import pytest

from firsttoken.study import paths
from firsttoken.study.errors import ClaimsError
from firsttoken_studies.record.notebooks import notebook_paths
from firsttoken_studies.record.report_index import index_tables, load_index, opener_rows

ENTRIES = load_index(paths.INDEX)


def test_what_the_index_names_exists():
    numbers = {path.name[:2] for path in notebook_paths()}
    assert {number for entry in ENTRIES for number in entry.notebooks} <= numbers
    figures = {name for entry in ENTRIES for name in entry.figures}
    assert {name for name in figures if not (paths.FIGURES / f"{name}.png").exists()} == set()
    assert {entry.code for entry in ENTRIES if entry.code and not (paths.ROOT / entry.code).exists()} == set()


def test_every_report_has_its_items():
    """As many as were counted in the reports: 25, 15, 28, 25 and 32."""
    counts = {report: 0 for report in ("ProgressiveServe", "CPS", "PETALS", "Sarathi-Serve", "DroidSpeak")}
    for entry in ENTRIES:
        counts[entry.report] += 1
    assert counts == {"ProgressiveServe": 25, "CPS": 15, "PETALS": 28, "Sarathi-Serve": 25, "DroidSpeak": 32}


def test_a_table_leads_to_notebooks_and_says_why_not():
    tables = index_tables(ENTRIES)
    assert "](../notebooks/13_cold_start.ipynb)" in tables["ProgressiveServe"]
    absent = next(entry for entry in ENTRIES if entry.not_here)
    assert absent.not_here in tables[absent.report]


def test_the_rows_of_an_opener_lead_from_the_notebooks_to_a_notebook_code_or_the_reason():
    reports = dict.fromkeys(entry.report for entry in ENTRIES)
    rows = {entry.id: row for report in reports for entry, row in zip(_of(report), opener_rows(report), strict=True)}
    assert rows["S1"] == {
        "place": "Algorithm 3; report, Stall-Free Scheduling",
        "what": "stall-free batching: all decodes first, then chunks of prompts up to a token budget",
        "where": "[40](40_generation_stalls.ipynb)",
    }
    assert rows["S5"]["where"] == "[code](../lib/firsttoken/engine/engine.py)"
    assert rows["D19"]["where"].startswith("not here: No pair of models with a mixture of experts")
    linked = {link for row in rows.values() for link in re.findall(r"\]\(([^)]*)\)", row["where"])}
    assert {link for link in linked if not (paths.NOTEBOOKS / link).exists()} == set()


def _of(report):
    return [entry for entry in ENTRIES if entry.report == report]


def test_an_opener_of_a_report_that_is_not_there_says_which_are():
    with pytest.raises(ClaimsError, match=r"no report 'Sarathi' in index\.yaml; there are: ProgressiveServe, CPS"):
        opener_rows("Sarathi")


ENTRY = "- {id: X, report: R, place: '', what: w, notebooks: [], figures: [], code: '', not_here: '', differs: ''}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ENTRY, "entry X: give a notebook or code"),
        (ENTRY.replace("not_here: ''", "not_here: no GPU").replace("code: ''", "code: lib"), "or else say in not_here"),
        (2 * ENTRY.replace("not_here: ''", "not_here: no GPU"), "used twice"),
        (ENTRY.replace("what: w, ", ""), "what"),
        ("- 3\n", "that is no mapping"),
        ("- {", "mend it, or restore it from git"),
    ],
)
def test_a_wrong_entry_is_named_in_one_line(tmp_path, text, says):
    path = tmp_path / "index.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ClaimsError, match=says) as raised:
        load_index(path)
    assert "\n" not in str(raised.value)
