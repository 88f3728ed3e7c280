"""The claims table as markdown, and its place in the README: paper, what was recorded, what this machine measured."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from firsttoken.study.claims import Claim
from firsttoken.study.errors import ClaimsError
from firsttoken.study.files import write_text
from firsttoken.study.record import Result, pick
from firsttoken.study.verdicts import Judgement, Verdict, judge, judge_all, show

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"
_CAPTION = re.compile(r"^Recorded: `([^`]+)`", re.MULTILINE)
_WIDTH = 90


@dataclass(frozen=True)
class Own:
    """What the reader's machine measured: its name, the profile that ran, and the results; shown beside the record."""

    machine: str
    profile: str
    results: tuple[Result, ...]


def table_for(claims: Iterable[Claim], results: Iterable[Result], machine: str, own: Own | None = None) -> str:
    """The claims judged by what was recorded on ``machine`` (a slug), beside a GPU's results and the reader's ``own``.

    A column that would be empty is left out. A verdict of the GPU that differs stands with its number.
    """
    claims, results = list(claims), list(results)
    columns = {"claim": [_says(claim) for claim in claims], "paper": [_paper(claim) for claim in claims]}
    recorded, gpu = (judge_all(claims, results, where) for where in (machine, "gpu"))
    mine = [judge(claim, pick(own.results, claim.experiment, claim.profiles, "any")) for claim in claims] if own else []
    if own:
        columns[f"yours: {own.machine}, {own.profile}"] = [judgement.measured for judgement in mine]
    columns["recorded" if own else "measured"] = [judgement.measured for judgement in recorded]
    if any(judgement.verdict != Verdict.NOT_RUN for judgement in gpu):
        columns["recorded GPU"] = [_beside(theirs, ours) for theirs, ours in zip(gpu, recorded, strict=True)]
    columns["tolerance"] = [_tolerance(claim) for claim in claims]
    columns["notebook"] = [claim.notebook for claim in claims]
    columns["human + compute min"] = [f"{show(claim.human_min)} + {show(claim.compute_min)}" for claim in claims]
    if own:
        columns["yours says"] = [judgement.says for judgement in mine]
    columns["the record says" if own else "verdict"] = [judgement.says for judgement in recorded]
    lines = [_row(columns), _row(["---"] * len(columns)), *map(_row, zip(*columns.values(), strict=True))]
    yours = f" Yours: `{own.machine}`, profile {own.profile}, whose samples are smaller." if own else ""
    return "\n".join([*lines, "", f"Recorded: `{machine}`, the largest profile that was run there.{yours}"])


def update_readme(path: Path, table: str) -> None:
    """Put ``table`` between the markers of the README. Raises ClaimsError when they are missing."""
    before, _, after = _split(path)
    write_text(path, f"{before}{BEGIN}\n{table}\n{END}{after}")


def readme_is_current(path: Path, table: str) -> bool:
    """Whether the README holds exactly ``table`` between its markers. Raises ClaimsError when they are missing."""
    return _split(path)[1].strip() == table.strip()


def readme_machine(path: Path) -> str | None:
    """The machine whose results the README's table shows, so that any other can show them too; None without a table."""
    found = _CAPTION.search(path.read_text(encoding="utf-8")) if path.exists() else None
    return found.group(1) if found else None


def _split(path: Path) -> tuple[str, str, str]:
    text = Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end):
        raise ClaimsError(f"{Path(path).name}: put the lines {BEGIN} and {END} where the claims table belongs")
    return before, inside, after


def _says(claim: Claim) -> str:
    return f"{claim.report}: {textwrap.shorten(claim.says, _WIDTH, placeholder=' ...')} ({claim.place})"


def _beside(theirs: Judgement, ours: Judgement) -> str:
    differs = theirs.verdict != Verdict.NOT_RUN and theirs.says != ours.says
    return f"{theirs.measured} ({theirs.says})" if differs else theirs.measured


def _paper(claim: Claim) -> str:
    if claim.kind == "ordering":
        return " < ".join(claim.measures)
    bound = {"<=": "≤ ", ">=": "≥ "}.get(claim.op or "", "")
    return f"{bound}{show(claim.value)} {claim.unit}".strip()


def _tolerance(claim: Claim) -> str:
    if claim.kind == "ratio":
        effect = f" of the effect beyond {show(claim.no_effect)}" if claim.no_effect else ""
        return f"± {claim.tolerance:.0%}{effect}"
    if claim.kind == "exact":
        return f"± {show(claim.tolerance)} {claim.unit}".strip() if claim.tolerance else "exact"
    return claim.kind


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in cells) + " |"
