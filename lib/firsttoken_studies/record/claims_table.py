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
from firsttoken_studies.record.verdicts import TOLERANCE, Judgement, Verdict, judge, judge_record, show

WIDTH, MOST = 100, 10  # characters of a line; contradictions that are named
_SHORT = {
    Verdict.REPRODUCED: "reproduced",
    Verdict.TREND: "trend",
    Verdict.FAILED: "failed",
    Verdict.CONTRADICTED: "sources",
    Verdict.DIFFERS: "by machine",
    Verdict.TOO_FEW: "too few",
    Verdict.NOT_RUN: "not run",
    Verdict.ELSEWHERE: "elsewhere",
}


@dataclass(frozen=True)
class OwnRun:
    """The results of the reader's machine: its name, the profile that ran, and the results; shown beside the record."""

    machine: str
    profile: str
    results: tuple[Result, ...]


def table_for(
    claims: Iterable[Claim], results: Iterable[Result], machine: str, own_run: OwnRun | None = None, log: Log = EMPTY
) -> str:
    """The claims judged by what was recorded on ``machine`` (a slug), beside other machines and the reader's
    ``own_run``. A column that would be empty is left out."""
    claims, results = list(claims), list(results)
    columns = {"claim": [f"{claim.report}: {_says(claim)}" for claim in claims], "report": [told(c) for c in claims]}
    recorded = judge_record(claims, results, machine, log)
    own_judgements = (
        [judge(claim, pick(own_run.results, claim.experiment, claim.profiles, "any")) for claim in claims]
        if own_run
        else []
    )
    if own_run:
        columns[f"yours: {own_run.machine}, {own_run.profile}"] = [judgement.measured for judgement in own_judgements]
    columns["recorded" if own_run else "measured"] = [judgement.measured for judgement in recorded]
    columns |= _others(recorded)
    columns["tolerance"] = [_tolerance(claim) for claim in claims]
    columns["notebook"] = [claim.notebook for claim in claims]
    if own_run:
        columns["yours says"] = [judgement.says for judgement in own_judgements]
    columns["the record says" if own_run else "verdict"] = [judgement.says for judgement in recorded]
    yours = f" Yours: `{own_run.machine}`, profile {own_run.profile}, with fewer observations." if own_run else ""
    return f"{table(columns)}\n\nRecorded: `{machine}`, the largest profile that was run there.{yours}"


def page_table(claims: Sequence[Claim], results: Sequence[Result], machine: str, log: Log = EMPTY) -> str:
    """Return the table of all that the ledger has on ``claims``, with conditions and minutes, judged by the record of
    ``machine``."""
    recorded = judge_record(claims, results, machine, log)
    columns = {
        "claim": [_says(claim) for claim in claims],
        "report": [told(claim) for claim in claims],
        "measured": [judgement.measured for judgement in recorded],
        **_others(recorded),
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
    where there are any, dependent on the machine. What the sources themselves contradict has a column of its own. Goals
    of this project are none of them (:func:`goals`), nor is a claim that another answers."""
    statements = [claim for claim in claims if claim.whose == "report"]
    judged = judge_record([claim for claim in statements if not claim.counts_as], results, machine, log)
    said_somewhere = [kind for kind in _SAID if kind != Verdict.DIFFERS or _count(judged, kind)]
    rows = {"report": list[str](), **{head: list[str]() for head in _HEADS.values()}}
    rows |= {str(Verdict.CONTRADICTED): list[str](), "not judged": list[str]()}
    for report in [*dict.fromkeys(judgement.claim.report for judgement in judged), None]:
        of_report = [judgement for judgement in judged if report in (None, judgement.claim.report)]
        rows["report"].append(report or "*all*")
        for ground in GROUNDS:
            numbers = [_count(of_report, kind, ground) for kind in said_somewhere]
            rows[_HEADS[ground]].append(" / ".join(map(str, numbers)) if any(numbers) else "")
        rows[str(Verdict.CONTRADICTED)].append(str(_count(of_report, Verdict.CONTRADICTED) or ""))
        rows["not judged"].append(str(sum(not judgement.verdict.judged for judgement in of_report) or ""))
    live, simulated, summed = (_count(judged, Verdict.REPRODUCED, ground) for ground in GROUNDS)
    differ = (
        f", for {_count(judged, Verdict.DIFFERS)} it depends on the machine"
        if Verdict.DIFFERS in said_somewhere
        else ""
    )
    sentence = (
        f"Of {len(judged)} statements of the reports **{live} were reproduced by a live run**, {simulated} by "
        f"simulation or replay, {summed} by arithmetic. {_count(judged, Verdict.TREND)} are trends only, "
        f"{_count(judged, Verdict.FAILED)} were not reproduced{differ}; "
        f"{_count(judged, Verdict.CONTRADICTED)} are contradicted by the reports' own sources, and "
        f"{sum(not judgement.verdict.judged for judgement in judged)} could not be judged. "
        f"{sum(judgement.standing == 'post hoc' for judgement in judged)} of the verdicts are post hoc. "
        f"{len(statements) - len(judged)} more statements are answered by a number that judges one of these, and count "
        f"with it. Each cell: {' / '.join(said_somewhere)}."
    )
    return f"{sentence}\n\n{table(rows)}"


def _count(judged: Iterable[Judgement], verdict: Verdict, ground: str | None = None) -> int:
    return sum(judgement.verdict == verdict and ground in (None, judgement.claim.stands_on) for judgement in judged)


def goals(claims: Sequence[Claim], results: Sequence[Result], machine: str, log: Log = EMPTY) -> str:
    """The goals that this project set itself: those it works towards, with how often each was tried, and those that its
    tests hold as well."""
    judged = judge_record([claim for claim in claims if claim.whose == "project"], results, machine, log)
    rows = {"goals of this project": list[str](), **{str(kind): list[str]() for kind in (*_SAID, Verdict.TOO_FEW)}}
    rows["times recorded"] = []
    for name, invariant in (("improvement targets", False), ("invariants, which tests hold too", True)):
        of_kind = [judgement for judgement in judged if judgement.claim.invariant == invariant]
        rows["goals of this project"].append(name)
        for verdict in (*_SAID, Verdict.TOO_FEW):
            rows[str(verdict)].append(str(_count(of_kind, verdict)))
        attempts = [len(log.answers(judgement.claim)) for judgement in of_kind]
        rows["times recorded"].append(f"{min(attempts)} to {max(attempts)}" if attempts else "")
    return table(rows)


def _kind(claim: Claim) -> str:
    if claim.whose == "report":
        return claim.nature if claim.nature == "configuration" else _HEADS[claim.stands_on]
    return f"{'invariant' if claim.invariant else 'goal'} of this project, {_HEADS[claim.stands_on]}"


def _fixed(judgement: Judgement) -> str:
    if judgement.verdict in (Verdict.NOT_RUN, Verdict.ELSEWHERE):
        return ""
    if judgement.standing:
        return judgement.standing
    return "yes, worded after it" if judgement.reworded else "yes"


def _times(claim: Claim, log: Log) -> str:
    """Say how often a claim was recorded, on how many machines, and with the least and the greatest value."""
    answers = [(line, answer) for line, answer in log.answers(claim) if answer.fixed != "other"]
    others = len(log.answers(claim)) - len(answers)
    if not answers:
        return ""
    machines = len({line.machine for line, _ in answers})
    text = (
        f"{len(answers)} times" if len(answers) > 1 else "once" + (f" on {machines} machines" if machines > 1 else "")
    )
    values = [answer.entries[0]["value"] for _, answer in answers]
    if len(answers) > 1 and claim.kind != "ordering" and all(is_number(value) for value in values):
        text += f", {show(min(values))} to {show(max(values))}"
    return text + (f"; {others} times by another measure" if others else "")


def _others(recorded: Iterable[Judgement]) -> dict[str, list[str]]:
    others = [judgement.others for judgement in recorded]
    return {"other machines": others} if any(others) else {}


def _says(claim: Claim) -> str:
    return f"{claim.says} ({claim.place})"


def told(claim: Claim) -> str:
    """Return the report's value, as a table shows it."""
    bound = {"<=": "≤ ", ">=": "≥ "}.get(claim.op or "", "")
    return claim.told or f"{bound}{show(claim.value)} {claim.unit}".strip()


def _tolerance(claim: Claim) -> str:
    if claim.kind == "ratio":
        effect = f" of the effect beyond {show(claim.no_effect)}" if claim.no_effect else ""
        return f"± {min(claim.tolerance, TOLERANCE):.0%}{effect}"
    if claim.kind == "exact":
        return f"± {show(claim.tolerance)} {claim.unit}".strip() if claim.tolerance else "exact"
    return claim.kind


def run_end(
    claims: Sequence[Claim], recorded: Iterable[Result], machine: str, own_run: OwnRun, log: Log = EMPTY
) -> list[str]:
    """Lines of at most ``WIDTH`` characters: by report how often each verdict falls in the reader's ``own_run``, and
    the claims of which it contradicts the record (of ``machine``) or the report most, each in two lines."""
    own_judgements = [judge(claim, pick(own_run.results, claim.experiment, claim.profiles, "any")) for claim in claims]
    theirs = judge_record(claims, recorded, machine, log)
    lines = [f"Your run ({own_run.machine}, profile {own_run.profile}) beside the reports:", ""]
    lines += _by_report(
        own_judgements, [verdict for verdict in _SHORT if verdict not in (Verdict.DIFFERS, Verdict.ELSEWHERE)]
    )
    against = sorted(filter(None, map(_against, own_judgements, theirs)), key=lambda row: row[0], reverse=True)
    if not against:
        return [*lines, "", "No claim that your run could judge contradicts the record or a report."]
    lines += ["", f"The {min(MOST, len(against))} claims of which it contradicts the record or the report most:"]
    for _, judgement, other in against[:MOST]:
        statement = f"{judgement.claim.notebook}  {judgement.claim.report}: {judgement.claim.says}"
        lines.append(textwrap.shorten(statement, WIDTH, placeholder=" ..."))
        values = f"yours {judgement.measured}; recorded {other.measured or 'nothing'}; report {told(judgement.claim)}"
        lines.append("    " + textwrap.shorten(values, WIDTH - 4, placeholder=" ..."))
    return lines


def overview(judged: Sequence[Judgement]) -> list[str]:
    """Return lines for a terminal: how often each verdict of the record falls, by report, and how to see the claims."""
    return [
        *_by_report(judged, _SHORT),
        "",
        f"`firsttoken claims --all` prints all {len(judged)}; `--report NAME` and `--verdict VERDICT` choose, by",
        *textwrap.wrap(f"{', '.join(str(verdict).replace(' ', '-') for verdict in _SHORT)}.", WIDTH),
    ]


def _by_report(judged: Sequence[Judgement], verdicts: Collection[Verdict]) -> list[str]:
    lines = [f"{'':<18}" + "".join(f"{_SHORT[verdict]:>11}" for verdict in verdicts)]
    for report in [*dict.fromkeys(judgement.claim.report for judgement in judged), "all"]:
        counts = Counter(judgement.verdict for judgement in judged if report in ("all", judgement.claim.report))
        lines.append(f"{report:<18}" + "".join(f"{counts[verdict]:>11}" for verdict in verdicts))
    return lines


def _against(own_judgement: Judgement, theirs: Judgement) -> tuple[tuple[bool, float], Judgement, Judgement] | None:
    """Return whether a run contradicts the record, its distance from the report's effect, and both judgements; None
    where it contradicts neither."""
    if not own_judgement.verdict.judged:
        return None
    record = theirs.verdict.judged and theirs.verdict not in (own_judgement.verdict, Verdict.DIFFERS)
    if not record and own_judgement.verdict != Verdict.FAILED:
        return None
    return (record, _distance(own_judgement)), own_judgement, theirs


def _distance(judged: Judgement) -> float:
    if judged.share is None:
        return 0.0
    return abs(math.log(judged.share)) if judged.share > 0 else math.inf
