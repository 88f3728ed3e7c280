"""What a run of the notebooks ends with: how many claims the reader's run bears out, and where it contradicts most."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from firsttoken.study.claims import Claim
from firsttoken.study.claims_table import Own, told
from firsttoken.study.record import Result, pick
from firsttoken.study.record_log import EMPTY, Log
from firsttoken.study.verdicts import Judgement, Verdict, judge, judge_record

WIDTH, MOST = 100, 10  # characters of a line; contradictions that are named
_HEADS = {
    Verdict.REPRODUCED: "reproduced",
    Verdict.TREND: "trend",
    Verdict.FAILED: "contradicted",
    Verdict.TOO_FEW: "n too small",
    Verdict.NOT_RUN: "not run",
}


def run_end(claims: Sequence[Claim], recorded: Iterable[Result], machine: str, own: Own, log: Log = EMPTY) -> list[str]:
    """Lines of at most ``WIDTH`` characters: by report how often each verdict falls in the reader's ``own`` run, and
    the claims of which it contradicts the record (of ``machine``) or the report most, each in two lines."""
    mine = [judge(claim, pick(own.results, claim.experiment, claim.profiles, "any")) for claim in claims]
    theirs = judge_record(claims, recorded, machine, log)
    lines = [f"Your run ({own.machine}, profile {own.profile}) beside the reports:", ""]
    lines.append(f"{'':<18}" + "".join(f"{head:>14}" for head in _HEADS.values()))
    reports = dict.fromkeys(claim.report for claim in claims)
    for report, counts in [(one, _counts(mine, one)) for one in reports] + [("all", _counts(mine))]:
        lines.append(f"{report:<18}" + "".join(f"{counts[verdict]:>14}" for verdict in _HEADS))
    against = sorted(filter(None, map(_against, mine, theirs)), key=lambda one: one[0], reverse=True)
    if not against:
        return [*lines, "", "No claim that your run could judge contradicts the record or a report."]
    lines += ["", f"The {min(MOST, len(against))} claims of which it contradicts the record or the report most:"]
    for _, one, other in against[:MOST]:
        said = f"{one.claim.notebook}  {one.claim.report}: {one.claim.says}"
        lines.append(textwrap.shorten(said, WIDTH, placeholder=" ..."))
        values = f"yours {one.measured}; recorded {other.measured or 'nothing'}; report {told(one.claim)}"
        lines.append("    " + textwrap.shorten(values, WIDTH - 4, placeholder=" ..."))
    return lines


def _counts(judged: Iterable[Judgement], report: str | None = None) -> Counter[Verdict]:
    return Counter(one.verdict for one in judged if report in (None, one.claim.report))


def _against(mine: Judgement, theirs: Judgement) -> tuple[tuple[bool, float], Judgement, Judgement] | None:
    """Whether it is the record that a run contradicts, and how far from the report's effect it is; None for neither."""
    if not mine.verdict.judged:
        return None
    record = theirs.verdict.judged and theirs.verdict not in (mine.verdict, Verdict.DIFFERS)
    if not record and mine.verdict != Verdict.FAILED:
        return None
    return (record, _distance(mine)), mine, theirs


def _distance(judged: Judgement) -> float:
    if judged.share is None:
        return 0.0
    return abs(math.log(judged.share)) if judged.share > 0 else math.inf
