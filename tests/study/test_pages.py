"""README.md, data/CLAIMS.md and notebooks say what was recorded, and nothing else puts numbers there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from entries import entry

from firsttoken.study import paths
from firsttoken.study.errors import ClaimsError, FirstTokenError, NotebookError
from firsttoken_studies.record import pages

TEMPLATE = """{{ value("machine", "m") }} x, {{ value("machine", "m", 3) }} x, {{ interval("machine", "m", 1) }}
{{ counts }}
{{ goals }}
{{ scoreboard }}
Recorded: `{{ machine }}`
{% for report, table in systems.items() %}## {{ report }}
{{ table }}{% endfor %}
"""


@pytest.fixture
def template(root: Path) -> Path:
    paths.TEMPLATES.mkdir()
    paths.INDEX.write_text("[]\n", encoding="utf-8")
    for page in pages.pages().values():
        page.write_text(TEMPLATE, encoding="utf-8")
    return paths.TEMPLATES / "README.md"


@pytest.fixture
def recorded(make_result):
    return [make_result(summary=[entry(value=1.5, low=1.25, high=1.75, n=20, unit="x")])]


def test_the_pages_hold_numbers_verdicts_and_counts(template: Path, claim, recorded) -> None:
    ledger = [claim(value=1.5, headline=True), claim(id="d", value=9, whose="project", nature="arithmetic")]
    assert pages.recorded_machine() is None and len(pages.outdated(ledger, recorded, "test-cpu-2c")) == 6
    pages.update(ledger, recorded, "test-cpu-2c")
    assert pages.recorded_machine() == "test-cpu-2c" and pages.outdated(ledger, recorded, "test-cpu-2c") == []
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    assert text.startswith("1.5 x, 1.500 x, 1.5 [1.2, 1.8]\n")
    assert "| progressive | 1 / 0 / 0 |" in text and "| *all* | 1 / 0 / 0 |" in text, "a goal is no claim"
    assert "| improvement targets | 0 | 0 | 1 | 0 | 0 |" in text
    assert text.count("says so") == 3 and text.count("says so (Table 1)") == 2, "a headline is in both"
    paths.CLAIMS_PAGE.write_text(text.replace("1.5 x", "1.6 x"), encoding="utf-8")
    assert pages.outdated(ledger, recorded, "test-cpu-2c") == [paths.CLAIMS_PAGE]


def test_a_template_may_name_the_machine_and_the_profile_of_a_number(
    template: Path, claim, recorded, make_result
) -> None:
    card = make_result(machine={"slug": "a-card", "gpu": "A Card"}, summary=[entry(value=7.0)])
    full = make_result(profile="full", summary=[entry(value=8.0)])
    names = ("machine", "machine on a-card", "machine of quick")
    template.write_text(", ".join(f'{{{{ value("{name}", "m") }}}}' for name in names), encoding="utf-8")
    assert pages.render(template, [claim()], [*recorded, card, full], "test-cpu-2c") == "8, 7, 1.5"
    with pytest.raises(ClaimsError, match="no result of 'machine'"):
        template.write_text('{{ value("machine of paper", "m") }}', encoding="utf-8")
        pages.render(template, [claim()], recorded, "test-cpu-2c")
    with pytest.raises(ClaimsError, match="b-card"):
        template.write_text('{{ value("machine on b-card", "m") }}', encoding="utf-8")
        pages.render(template, [claim()], [*recorded, card], "test-cpu-2c")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ('{{ value("machin", "m") }}', "README.md: no result of 'machin'"),
        ('{{ table("machine") }}', "README.md: 'machine' has no table; known: none"),
        ('{{ value("machine", "n") }}', "README.md: machine: no measure n; known: m"),
        ('{{ value("machine", "m", policy="swap") }}', r"README.md: machine: no measure m \(policy swap\); known: m"),
        ("{{ nothing }}", "README.md: 'nothing' is undefined"),
        ("{% for %}", "README.md: "),
    ],
)
def test_a_template_that_asks_for_what_nobody_recorded_writes_nothing(
    template: Path, claim, recorded, said: str, message: str
) -> None:
    template.write_text(said, encoding="utf-8")
    with pytest.raises(ClaimsError, match=message):
        pages.update([claim()], recorded, "test-cpu-2c")
    assert not paths.CLAIMS_PAGE.exists()


NOTEBOOK_PART = """<!-- cell: said -->
**Verdict.** It is {{ value("machine", "m", 1) }} [{{ count("machine", "m") }} runs], twice that {{ 2 * raw("machine",
"m") }}.

<!-- cell: more -->
{{ value("machine", "m", 0, 100) }} %
"""


@pytest.fixture
def notebook(template: Path) -> Path:
    cells = [{"id": name, "cell_type": "markdown", "source": []} for name in ("said", "own", "more")]
    cells.append({"id": "code", "cell_type": "code", "source": ["1"], "outputs": []})
    path = paths.NOTEBOOKS / "07_seven.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    (paths.STUDIES / "nb07_seven").mkdir(parents=True)
    (paths.STUDIES / "nb07_seven" / "page.md").write_text(NOTEBOOK_PART, encoding="utf-8")
    return path


def test_a_notebook_says_what_was_recorded(notebook: Path, claim, recorded, make_result) -> None:
    pages.update([claim()], recorded, "test-cpu-2c")
    said = {cell["id"]: "".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]}
    assert said["said"] == "**Verdict.** It is 1.5 [20 runs], twice that 3.0." and said["more"] == "150 %"
    assert said["own"] == "" and said["code"] == "1"
    assert pages.outdated([claim()], recorded, "test-cpu-2c") == []
    again = [make_result(summary=[entry(value=1.7, low=1.25, high=1.75, n=20, unit="x")])]
    assert notebook in pages.outdated([claim()], again, "test-cpu-2c"), "a result changed, its prose did not"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- cell: code -->\nx", "07_seven.ipynb has no markdown cell 'code'; there are: said, own, more"),
        ("x\n<!-- cell: said -->\ny", "text before the first `<!-- cell: ID -->`: 'x'"),
    ],
)
def test_a_part_without_a_cell_is_refused(notebook: Path, claim, recorded, text: str, message: str) -> None:
    (paths.STUDIES / "nb07_seven" / "page.md").write_text(text, encoding="utf-8")
    with pytest.raises(ClaimsError, match=message):
        pages.update([claim()], recorded, "test-cpu-2c")


def test_a_template_without_a_notebook_is_refused(notebook: Path, claim, recorded) -> None:
    notebook.unlink()
    with pytest.raises(NotebookError, match="no notebook 07"):
        pages.update([claim()], recorded, "test-cpu-2c")


def test_a_machine_without_results_is_refused(template: Path, claim, recorded) -> None:
    with pytest.raises(FirstTokenError, match="no results of a machine 'test-cpu-3c'"):
        pages.update([claim()], recorded, "test-cpu-3c")
