"""README.md and data/CLAIMS.md say what was recorded, and nothing else puts numbers there."""

from __future__ import annotations

from pathlib import Path

import pytest

from firsttoken.study import pages, paths
from firsttoken.study.errors import ClaimsError, FirstTokenError

TEMPLATE = """{{ n("machine", "m") }} x, {{ n("machine", "m", 3) }} x, {{ i("machine", "m", 1) }}
{{ counts }}
{{ scoreboard }}
Recorded: `{{ machine }}`
{% for report, table in systems.items() %}## {{ report }}
{{ table }}{% endfor %}
"""


@pytest.fixture
def template(root: Path) -> Path:
    paths.TEMPLATES.mkdir()
    for page in pages.pages().values():
        page.write_text(TEMPLATE, encoding="utf-8")
    return paths.TEMPLATES / "README.md"


@pytest.fixture
def recorded(make_result):
    return [make_result(summary={"m": {"value": 1.5, "low": 1.25, "high": 1.75, "n": 20, "unit": "x"}})]


def test_the_pages_hold_numbers_verdicts_and_counts(template: Path, claim, recorded) -> None:
    ledger = [claim(value=1.5, headline=True), claim(id="d", value=9, whose="project", nature="arithmetic")]
    assert pages.recorded_machine() is None and len(pages.outdated(ledger, recorded, "test-cpu-2c")) == 2
    pages.update(ledger, recorded, "test-cpu-2c")
    assert pages.recorded_machine() == "test-cpu-2c" and pages.outdated(ledger, recorded, "test-cpu-2c") == []
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    assert text.startswith("1.5 x, 1.500 x, 1.5 [1.2, 1.8]\n")
    assert "| progressive | 1 | 0 | 1 | 0 | 2 |" in text, "one holds, one does not, both are post hoc"
    assert "| *all, measured* | 1 | 0 | 0 | 0 | 1 |" in text and "| *all, goals of this project* | 0 | 0 | 1 |" in text
    assert text.count("says so") == 3 and text.count("says so (Table 1)") == 2, "a headline is in both"
    paths.CLAIMS_PAGE.write_text(text.replace("1.5 x", "1.6 x"), encoding="utf-8")
    assert pages.outdated(ledger, recorded, "test-cpu-2c") == [paths.CLAIMS_PAGE]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ('{{ n("machin", "m") }}', "README.md: no result of 'machin' on test-cpu-2c"),
        ('{{ n("machine", "n") }}', "README.md: machine has no 'n'; known: m"),
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


def test_a_machine_without_results_is_refused(template: Path, claim, recorded) -> None:
    with pytest.raises(FirstTokenError, match="no results of a machine 'test-cpu-3c'"):
        pages.update([claim()], recorded, "test-cpu-3c")
