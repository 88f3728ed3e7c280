"""The README's scoreboard, held to a script that shares no code with the ledger."""

from __future__ import annotations

from independent_scoreboard import ROOT, SAID, scoreboard

GROUNDS = ("live", "simulated", "arithmetic")


def told(cell: str) -> str:
    """A cell of the README, which leaves out the count of those that depend on the machine where all of them are 0."""
    return cell if cell.count("/") == len(SAID) - 1 else f"{cell} / 0"


def test_the_readme_counts_as_an_independent_script_does() -> None:
    expected, table = scoreboard(), (ROOT / "README.md").read_text(encoding="utf-8").split("| report |", 1)[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n\n")[0].splitlines()[2:]]
    shown = {row[0]: dict(zip(GROUNDS, row[1:4], strict=True)) for row in rows}
    assert shown.keys() == expected.keys()
    for report, cells in shown.items():
        for ground in GROUNDS:
            nothing = not cells[ground] and not any(map(int, expected[report].get(ground, "0").split(" / ")))
            assert nothing or told(cells[ground]) == expected[report][ground], (report, ground)
    assert SAID == ("reproduced", "trend only", "not reproduced", "machine-dependent")
