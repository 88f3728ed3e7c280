"""The index of the reports' figures names what exists, and says of the rest why it does not."""

from __future__ import annotations

import pytest

from firsttoken.study import paths
from firsttoken.study.errors import ClaimsError
from firsttoken.study.notebooks import notebook_paths
from firsttoken.study.report_index import index_tables, load_index

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
