"""Claims as tables of markdown: what the reports say, what was recorded, what this machine measured, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from firsttoken.study.claims import NATURES, Claim
from firsttoken.study.markdown import table
from firsttoken.study.record import Result, pick
from firsttoken.study.verdicts import Judgement, Verdict, judge, judge_all, judge_record, show


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
    columns = {"claim": [f"{claim.report}: {_says(claim)}" for claim in claims], "report": [told(c) for c in claims]}
    recorded = judge_record(claims, results, machine)
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
    yours = f" Yours: `{own.machine}`, profile {own.profile}, whose samples are smaller." if own else ""
    return f"{table(columns)}\n\nRecorded: `{machine}`, the largest profile that was run there.{yours}"


def page_table(claims: Sequence[Claim], results: Sequence[Result], machine: str) -> str:
    """All that the ledger has on ``claims``, with conditions and minutes, judged by the record of ``machine``."""
    recorded = judge_record(claims, results, machine)
    columns = {
        "claim": [_says(claim) for claim in claims],
        "report": [told(claim) for claim in claims],
        "measured": [judgement.measured for judgement in recorded],
        **_gpu(claims, results, recorded),
        "conditions": [claim.conditions for claim in claims],
        "kind": [", ".join(dict.fromkeys((claim.nature, claim.whose))) for claim in claims],
        "tolerance": [_tolerance(claim) for claim in claims],
        "notebook": [claim.notebook for claim in claims],
        "human + compute min": [f"{show(claim.human_min)} + {show(claim.compute_min)}" for claim in claims],
        "verdict": [f"{judgement.says}: {judgement.why}" for judgement in recorded],
    }
    return table(columns)


def scoreboard(claims: Sequence[Claim], results: Sequence[Result], machine: str) -> str:
    """The headline claims with their conditions, judged by the record of ``machine``."""
    recorded = judge_record([claim for claim in claims if claim.headline], results, machine)
    columns = {
        "claim": [f"{judgement.claim.report}: {judgement.claim.says}" for judgement in recorded],
        "report": [told(judgement.claim) for judgement in recorded],
        "measured": [judgement.measured for judgement in recorded],
        "conditions": [judgement.claim.conditions for judgement in recorded],
        "verdict": [f"**{judgement.says}** ({judgement.claim.notebook})" for judgement in recorded],
    }
    return table(columns)


def counts(claims: Sequence[Claim], results: Sequence[Result], machine: str) -> str:
    """How often each verdict falls, by report, and by whose the number is and of what nature."""
    rows = {"report": list[str](), **{str(verdict): list[str]() for verdict in Verdict}, "post hoc": list[str]()}
    groups = {report: [c for c in claims if c.report == report] for report in dict.fromkeys(c.report for c in claims)}
    for nature in NATURES:
        groups[f"*all, {nature}*"] = [c for c in claims if c.nature == nature and c.whose == "report"]
    groups["*all, goals of this project*"] = [c for c in claims if c.whose == "project"]
    for name, of in groups.items():
        judged = judge_record(of, results, machine)
        rows["report"].append(name)
        for verdict in Verdict:
            rows[str(verdict)].append(str(sum(judgement.verdict == verdict for judgement in judged)))
        rows["post hoc"].append(str(sum(judgement.post_hoc for judgement in judged)))
    return table(rows)


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
        return f"± {claim.tolerance:.0%}{effect}"
    if claim.kind == "exact":
        return f"± {show(claim.tolerance)} {claim.unit}".strip() if claim.tolerance else "exact"
    return claim.kind
