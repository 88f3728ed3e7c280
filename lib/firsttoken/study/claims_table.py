"""The claims table: paper, this machine, recorded GPU and verdict, as markdown, and its place in the README."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from firsttoken.study.claims import Claim, Judgement, Verdict, judge_all, show
from firsttoken.study.errors import ClaimsError
from firsttoken.study.files import write_text
from firsttoken.study.machine import machine_slug
from firsttoken.study.record import Result

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"
HEADINGS = (
    "claim",
    "paper",
    "measured here",
    "recorded GPU",
    "tolerance",
    "notebook",
    "human + compute min",
    "verdict",
)
_CAPTION = re.compile(r"^Measured here: `([^`]+)`", re.MULTILINE)
_WIDTH = 90


def table_for(claims: Iterable[Claim], results: Iterable[Result], machine: str | None = None) -> str:
    """The claims table of ``machine`` (a slug, None for this machine) beside the results recorded on a GPU."""
    claims, results = list(claims), list(results)
    here = machine or machine_slug()
    return claims_table(judge_all(claims, results, here), judge_all(claims, results, "gpu"), here)


def claims_table(here: Iterable[Judgement], recorded: Iterable[Judgement], machine: str) -> str:
    """Markdown table of the judgements ``here`` on ``machine``; ``recorded`` are those of the same claims on a GPU.

    The last column judges what was measured here. A verdict of the GPU that differs stands with its number.
    """
    lines = [_row(HEADINGS), _row(["---"] * len(HEADINGS))]
    for mine, theirs in zip(here, recorded, strict=True):
        claim = mine.claim
        differs = theirs.verdict not in (Verdict.NOT_RUN, mine.verdict)
        gpu = f"{theirs.measured} ({theirs.verdict})" if differs else theirs.measured
        minutes = f"{show(claim.human_min)} + {show(claim.compute_min)}"
        says = f"{claim.report}: {textwrap.shorten(claim.says, _WIDTH, placeholder=' ...')} ({claim.place})"
        cells = [says, _paper(claim), mine.measured, gpu, _tolerance(claim), claim.notebook, minutes, mine.verdict]
        lines.append(_row(cells))
    return "\n".join([*lines, "", f"Measured here: `{machine}`."])


def update_readme(path: Path, table: str) -> None:
    """Put ``table`` between the markers of the README. Raises ClaimsError when they are missing."""
    before, _, after = _split(path)
    write_text(path, f"{before}{BEGIN}\n{table}\n{END}{after}")


def readme_is_current(path: Path, table: str) -> bool:
    """Whether the README holds exactly ``table`` between its markers. Raises ClaimsError when they are missing."""
    return _split(path)[1].strip() == table.strip()


def readme_machine(path: Path) -> str | None:
    """The machine whose results the README's table shows, so that it can be checked on any other machine."""
    found = _CAPTION.search(_split(path)[1])
    return found.group(1) if found else None


def _split(path: Path) -> tuple[str, str, str]:
    text = Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end):
        raise ClaimsError(f"{Path(path).name}: put the lines {BEGIN} and {END} where the claims table belongs")
    return before, inside, after


def _paper(claim: Claim) -> str:
    if claim.kind == "ordering":
        return " < ".join(claim.measures)
    bound = {"<=": "≤ ", ">=": "≥ "}.get(claim.op or "", "")
    return f"{bound}{show(claim.value)} {claim.unit}".strip()


def _tolerance(claim: Claim) -> str:
    if claim.kind == "ratio":
        return f"± {claim.tolerance:.0%}"
    if claim.kind == "exact":
        return f"± {show(claim.tolerance)} {claim.unit}".strip() if claim.tolerance else "exact"
    return claim.kind


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in cells) + " |"
