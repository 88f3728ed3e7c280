"""Claims as tables of markdown: what the reports say, what was recorded, what this machine measured, and verdicts.

A run of the notebooks ends with how many claims the reader's run bears out, and where it contradicts most.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from firsttoken_studies.record.claims import GROUNDS, Claim, is_number
from firsttoken_studies.record.markdown import table
from firsttoken_studies.record.record_log import EMPTY, Log
from firsttoken_studies.record.results import Result, pick
from firsttoken_studies.record.verdicts import TOLERANCE, Judgement, Verdict, judge, judge_all, judge_record, show

WIDTH, MOST = 100, 10  # characters of a line; contradictions that are named
_SHORT = {
    Verdict.REPRODUCED: "reproduced",
    Verdict.TREND: "trend",
    Verdict.FAILED: "contradicted",
    Verdict.DIFFERS: "by machine",
    Verdict.TOO_FEW: "n too small",
    Verdict.NOT_RUN: "not run",
}


@dataclass(frozen=True)
class Own:
    """What the reader's machine measured: its name, the profile that ran, and the results; shown beside the record."""

    machine: str
    profile: str
    results: tuple[Result, ...]


def table_for(
    claims: Iterable[Claim], results: Iterable[Result], machine: str, own: Own | None = None, log: Log = EMPTY
) -> str:
    """The claims judged by what was recorded on ``machine`` (a slug), beside a GPU's results and the reader's ``own``.

    A column that would be empty is left out. A verdict of the GPU that differs stands with its number.
    """
    claims, results = list(claims), list(results)
    columns = {"claim": [f"{claim.report}: {_says(claim)}" for claim in claims], "report": [told(c) for c in claims]}
    recorded = judge_record(claims, results, machine, log)
    mine = [judge(claim, pick(own.results, claim.experiment, claim.profiles, "any")) for claim in claims] if own else []
    if own:
        columns[f"yours: {own.machine}, {own.profile}"] = [judgement.measured for judgement in mine]
    columns["recorded" if own else "measured"] = [judgement.measured for judgement in recorded]
    columns |= _gpu(claims, results, recorded)
    columns["tolerance"] = [_tolerance(claim) for claim in claims]
    columns["notebook"] = [claim.notebook for claim in claims]
    if own:
        columns["yours says"] = [judgement.says for judgement in mine]
    columns["the record says" if own else "verdict"] = [judgement.says for judgement in recorded]
    yours = f" Yours: `{own.machine}`, profile {own.profile}, with fewer observations." if own else ""
    return f"{table(columns)}\n\nRecorded: `{machine}`, the largest profile that was run there.{yours}"


def page_table(claims: Sequence[Claim], results: Sequence[Result], machine: str, log: Log = EMPTY) -> str:
    """All that the ledger has on ``claims``, with conditions and minutes, judged by the record of ``machine``."""
    recorded = judge_record(claims, results, machine, log)
    columns = {
        "claim": [_says(claim) for claim in claims],
        "report": [told(claim) for claim in claims],
        "measured": [judgement.measured for judgement in recorded],
        **_gpu(claims, results, recorded),
        "conditions": [claim.conditions for claim in claims],
        "kind": [_kind(claim) for claim in claims],
        "tolerance": [_tolerance(claim) for claim in claims],
        "fixed before the run": [_fixed(judgement) for judgement in recorded],
        "recorded": [_times(claim, log) for claim in claims],
        "notebook": [claim.notebook for claim in claims],
        "human + compute min": [f"{show(claim.human_min)} + {show(claim.compute_min)}" for claim in claims],
        "verdict": [f"{judgement.says}: {judgement.why}" for judgement in recorded],
    }
    return table(columns)


def scoreboard(claims: Sequence[Claim], results: Sequence[Result], machine: str, log: Log = EMPTY) -> str:
    """The headline claims with their conditions, judged by the record of ``machine``."""
    recorded = judge_record([claim for claim in claims if claim.headline], results, machine, log)
    columns = {
        "claim": [f"{judgement.claim.report}: {judgement.claim.says}" for judgement in recorded],
        "report": [told(judgement.claim) for judgement in recorded],
        "measured": [judgement.measured for judgement in recorded],
        "conditions": [judgement.claim.conditions for judgement in recorded],
        "verdict": [f"**{judgement.says}** ({judgement.claim.notebook})" for judgement in recorded],
    }
    return table(columns)


_SAID = (Verdict.REPRODUCED, Verdict.TREND, Verdict.FAILED, Verdict.DIFFERS)
_HEADS = {"live": "measured live", "simulated": "simulated or replayed", "arithmetic": "arithmetic"}


def counts(claims: Sequence[Claim], results: Sequence[Result], machine: str, log: Log = EMPTY) -> str:
    """The claims of the reports, by what a value stands on: how many are reproduced, a trend only, not reproduced, and,
    where there are any, dependent on the machine. Goals of this project are none of them (:func:`goals`)."""
    judged = judge_record([claim for claim in claims if claim.whose == "report"], results, machine, log)
    said_somewhere = [one for one in _SAID if one != Verdict.DIFFERS or any(each.verdict == one for each in judged)]
    rows = {"report": list[str](), **{head: list[str]() for head in _HEADS.values()}, "not judged": list[str]()}
    for report in [*dict.fromkeys(one.claim.report for one in judged), None]:
        mine = [one for one in judged if report in (None, one.claim.report)]
        rows["report"].append(report or "*all*")
        for ground in GROUNDS:
            verdicts = [one.verdict for one in mine if one.claim.stands_on == ground and one.verdict.judged]
            rows[_HEADS[ground]].append(
                " / ".join(str(verdicts.count(one)) for one in said_somewhere) if verdicts else ""
            )
        rows["not judged"].append(str(sum(not one.verdict.judged for one in mine) or ""))
    met = [
        sum(one.verdict == Verdict.REPRODUCED and one.claim.stands_on == ground for one in judged) for ground in GROUNDS
    ]
    trend, failed = (sum(one.verdict == verdict for one in judged) for verdict in (Verdict.TREND, Verdict.FAILED))
    open_ = sum(not one.verdict.judged for one in judged)
    said = (
        f"Of {len(judged)} statements of the reports **{met[0]} were reproduced by a live run** on processors with two "
        f"cores, {met[1]} by simulation or replay, {met[2]} by arithmetic. {trend} have the report's direction and a "
        f"size within a factor of two, {failed} were not reproduced, {open_} could not be judged. "
        f"Each cell: {' / '.join(said_somewhere)}."
    )
    return f"{said}\n\n{table(rows)}"


def goals(claims: Sequence[Claim], results: Sequence[Result], machine: str, log: Log = EMPTY) -> str:
    """The goals that this project set itself: those it works towards, with how often each was tried, and those that its
    tests hold as well."""
    judged = judge_record([claim for claim in claims if claim.whose == "project"], results, machine, log)
    rows = {"goals of this project": list[str](), **{str(one): list[str]() for one in (*_SAID, Verdict.TOO_FEW)}}
    rows["times recorded"] = []
    for name, invariant in (("improvement targets", False), ("invariants, which tests hold too", True)):
        mine = [one for one in judged if one.claim.invariant == invariant]
        rows["goals of this project"].append(name)
        for verdict in (*_SAID, Verdict.TOO_FEW):
            rows[str(verdict)].append(str(sum(one.verdict == verdict for one in mine)))
        tried = [len(log.answers(one.claim)) for one in mine]
        rows["times recorded"].append(f"{min(tried)} to {max(tried)}" if tried else "")
    return table(rows)


def _kind(claim: Claim) -> str:
    if claim.whose == "report":
        return claim.nature if claim.nature == "configuration" else _HEADS[claim.stands_on]
    return f"{'invariant' if claim.invariant else 'goal'} of this project, {_HEADS[claim.stands_on]}"


def _fixed(judgement: Judgement) -> str:
    if judgement.verdict == Verdict.NOT_RUN:
        return ""
    if judgement.standing:
        return judgement.standing
    return "yes, worded after it" if judgement.reworded else "yes"


def _times(claim: Claim, log: Log) -> str:
    """How often a claim was recorded, on how many machines, and from which value to which."""
    found = [(line, answer) for line, answer in log.answers(claim) if answer.fixed != "other"]
    others = len(log.answers(claim)) - len(found)
    if not found:
        return ""
    machines = len({line.machine for line, _ in found})
    text = f"{len(found)} times" if len(found) > 1 else "once" + (f" on {machines} machines" if machines > 1 else "")
    values = [answer.entries[0]["value"] for _, answer in found]
    if len(found) > 1 and claim.kind != "ordering" and all(is_number(value) for value in values):
        text += f", {show(min(values))} to {show(max(values))}"
    return text + (f"; {others} times by another measure" if others else "")


def _gpu(claims: Iterable[Claim], results: Iterable[Result], recorded: Iterable[Judgement]) -> dict[str, list[str]]:
    gpu = judge_all(claims, results, "gpu")
    if all(judgement.verdict == Verdict.NOT_RUN for judgement in gpu):
        return {}
    return {"recorded GPU": [_beside(theirs, ours) for theirs, ours in zip(gpu, recorded, strict=True)]}


def _beside(theirs: Judgement, ours: Judgement) -> str:
    differs = theirs.verdict != Verdict.NOT_RUN and theirs.says != ours.says
    return f"{theirs.measured} ({theirs.says})" if differs else theirs.measured


def _says(claim: Claim) -> str:
    return f"{claim.says} ({claim.place})"


def told(claim: Claim) -> str:
    """What the report has, as a table shows it."""
    bound = {"<=": "≤ ", ">=": "≥ "}.get(claim.op or "", "")
    return claim.told or f"{bound}{show(claim.value)} {claim.unit}".strip()


def _tolerance(claim: Claim) -> str:
    if claim.kind == "ratio":
        effect = f" of the effect beyond {show(claim.no_effect)}" if claim.no_effect else ""
        return f"± {min(claim.tolerance, TOLERANCE):.0%}{effect}"
    if claim.kind == "exact":
        return f"± {show(claim.tolerance)} {claim.unit}".strip() if claim.tolerance else "exact"
    return claim.kind


def run_end(claims: Sequence[Claim], recorded: Iterable[Result], machine: str, own: Own, log: Log = EMPTY) -> list[str]:
    """Lines of at most ``WIDTH`` characters: by report how often each verdict falls in the reader's ``own`` run, and
    the claims of which it contradicts the record (of ``machine``) or the report most, each in two lines."""
    mine = [judge(claim, pick(own.results, claim.experiment, claim.profiles, "any")) for claim in claims]
    theirs = judge_record(claims, recorded, machine, log)
    lines = [f"Your run ({own.machine}, profile {own.profile}) beside the reports:", ""]
    lines += _by_report(mine, [verdict for verdict in _SHORT if verdict != Verdict.DIFFERS])
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


def overview(judged: Sequence[Judgement]) -> list[str]:
    """Return lines for a terminal: how often each verdict of the record falls, by report, and how to see the claims."""
    return [
        *_by_report(judged, _SHORT),
        "",
        f"`firsttoken claims --all` prints all {len(judged)}; `--report NAME` and `--verdict VERDICT` choose, by",
        f"{', '.join(str(verdict).replace(' ', '-') for verdict in _SHORT)}.",
    ]


def _by_report(judged: Sequence[Judgement], verdicts: Collection[Verdict]) -> list[str]:
    lines = [f"{'':<18}" + "".join(f"{_SHORT[verdict]:>14}" for verdict in verdicts)]
    for report in [*dict.fromkeys(one.claim.report for one in judged), "all"]:
        counts = Counter(one.verdict for one in judged if report in ("all", one.claim.report))
        lines.append(f"{report:<18}" + "".join(f"{counts[verdict]:>14}" for verdict in verdicts))
    return lines


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
