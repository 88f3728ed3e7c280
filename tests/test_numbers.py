"""Every number of the reports is judged or says why it is not, and every erratum that is named is explained."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import yaml

from firsttoken.study import paths
from firsttoken_studies.record.claims import claim_files

NUMBERS: list[dict[str, Any]] = yaml.safe_load((paths.DATA / "numbers.yaml").read_text(encoding="utf-8"))
LEDGER: list[dict[str, Any]] = [
    claim for path in claim_files(paths.STUDIES) for claim in yaml.safe_load(path.read_text(encoding="utf-8"))
]
CLAIMS = {claim["id"] for claim in LEDGER}
COUNT = 163
IDS_SHA256 = "915e111a1f403499dceec5f1bc3faf43d2cd8c4be764b153aae2e97e207d7482"  # sorted, one a line

ERRATA = re.findall(r"^\| (I\d+) \|", (paths.DATA / "errata.md").read_text(encoding="utf-8"), re.MULTILINE)
NAMES_ERRATA = (
    paths.ROOT / "README.md",
    *sorted(paths.NOTEBOOKS.glob("*.ipynb")),
    *sorted(path for path in paths.DATA.glob("*") if path.suffix in (".md", ".yaml")),
    *sorted((paths.ROOT / "lib").rglob("*.py")),
)


def test_every_number_is_judged_or_says_why_not() -> None:
    for number in NUMBERS:
        (answer,) = number.keys() - {"id", "system", "says", "place"}
        assert number.keys() == {"id", "system", "says", "place", answer}, number["id"]
        assert all(isinstance(number[key], str) and number[key].strip() for key in number.keys() - {"claims"})
        if answer == "claims":
            assert number["claims"] and set(number["claims"]) <= CLAIMS, number["id"]
            assert len(number["claims"]) == len(set(number["claims"])), number["id"]
        else:
            assert answer == "why_not", number["id"]


def test_no_number_is_lost_or_renamed() -> None:
    ids = [number["id"] for number in NUMBERS]
    assert len(ids) == len(set(ids)) == COUNT
    assert hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest() == IDS_SHA256


def test_every_claim_of_the_reports_judges_a_number() -> None:
    judging = {claim for number in NUMBERS for claim in number.get("claims", [])}
    assert judging >= {claim["id"] for claim in LEDGER if claim.get("whose") != "project"}


def test_what_contradicts_a_claim_is_a_row() -> None:
    rows = set(re.findall(r"^\| ([IN]\d+) \|", (paths.DATA / "errata.md").read_text(encoding="utf-8"), re.MULTILINE))
    contradicted = {claim["erratum"] for claim in LEDGER if "erratum" in claim}
    assert contradicted and contradicted <= rows


def test_every_erratum_that_is_named_is_a_row() -> None:
    assert [int(row[1:]) for row in ERRATA] == list(range(1, 45))
    named = {row for path in NAMES_ERRATA for row in errata_of(path)}
    assert named and named <= set(ERRATA)


def errata_of(path: Path) -> set[str]:
    """The rows that a file refers to: "errata I9", "errata I3, I4, I14"."""
    lists = re.findall(r"\berrat(?:a|um) (I\d+(?:(?:,| and) I\d+)*)", path.read_text(encoding="utf-8"))
    return {row for found in lists for row in re.findall(r"I\d+", found)}
