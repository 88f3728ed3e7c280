"""Judges a claim by a result: the verdict depends on the interval of what was measured.

*Reproduced*: within the tolerance, and the effect's interval excludes no effect. *Trend only*: the interval excludes
no effect, and the effect is within a factor of two of the report's. *Not reproduced* otherwise. A bound is reproduced
where the whole interval keeps to it, and a trend also where it lies across. Fewer than five observations are too few to
judge what was measured; a byte count or a product of published numbers needs none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from firsttoken.study.claims import Claim, is_number
from firsttoken.study.record import Result, pick
from firsttoken.study.stats import FEWEST
from firsttoken.study.summary import named

WITHIN = 2.0  # an effect is of the report's size where neither is more than so many times the other


class Verdict(StrEnum):
    """What may be said of a claim."""

    REPRODUCED = "reproduced"
    TREND = "trend only"
    FAILED = "not reproduced"
    TOO_FEW = "n too small to judge"
    NOT_RUN = "not run here"

    @property
    def judged(self) -> bool:
        """Whether it says anything of the claim."""
        return self not in (Verdict.TOO_FEW, Verdict.NOT_RUN)


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, what was measured (as text), and the reason in a few words.

    ``post_hoc``: the claim is not the one that stood in the ledger when the run began. ``measured`` names the machine
    where it is not the one that was asked for. ``share`` is what was measured in parts of the report's effect, where
    the claim says what no effect would be.
    """

    claim: Claim
    measured: str
    verdict: Verdict
    why: str
    post_hoc: bool = False
    share: float | None = None

    @property
    def says(self) -> str:
        """The verdict as every table shows it."""
        return f"{self.verdict}, post hoc" if self.post_hoc else str(self.verdict)


def judge(claim: Claim, result: Result | None) -> Judgement:
    """The verdict on ``claim`` from ``result``; "not run here" without one, or when it lacks the measure."""
    if result is None:
        return Judgement(claim, "", Verdict.NOT_RUN, f"no result of {claim.experiment}")
    absent = [named(claim.measure, where) for where in claim.places if not result.summary.get(claim.measure, **where)]
    if absent:
        return Judgement(claim, "", Verdict.NOT_RUN, f"the result of {claim.experiment} has no {', '.join(absent)}")
    found = [result.summary.of(claim.measure, **where) for where in claim.places]
    if claim.kind != "exact" and not all(is_number(entry["value"]) for entry in found):
        return Judgement(claim, "", Verdict.NOT_RUN, f"{claim.measure} must be a number")
    counts = [entry["n"] for entry in found if "n" in entry]
    if claim.nature == "measured" and counts and min(counts) < FEWEST:
        verdict, why = Verdict.TOO_FEW, f"n = {min(counts)}: too few to judge"
    else:
        verdict, why = _RULES[claim.kind](claim, found)
    post_hoc = result.entries.get(claim.id) != claim.digest
    share = None if claim.no_effect is None or claim.kind == "ordering" else effect(claim, found[0])[1]
    return Judgement(claim, _measured(claim, found), verdict, why, post_hoc, share)


def judge_all(claims: Iterable[Claim], results: Iterable[Result], machine: str | None = None) -> list[Judgement]:
    """One judgement a claim, from the result that ``record.pick`` prefers on ``machine`` (None: this machine)."""
    results = list(results)
    return [judge(claim, pick(results, claim.experiment, claim.profiles, machine)) for claim in claims]


def judge_record(claims: Iterable[Claim], results: Iterable[Result], machine: str) -> list[Judgement]:
    """Judge as ``judge_all`` does; an experiment that only another machine without a GPU has recorded is judged by
    that, which ``measured`` says. No verdict mixes two machines."""
    results = list(results)
    others = [result for result in results if not result.machine["gpu"] and result.slug != machine]
    return [
        judged if judged.verdict != Verdict.NOT_RUN else _elsewhere(judged, others)
        for judged in judge_all(claims, results, machine)
    ]


def _elsewhere(here: Judgement, others: Iterable[Result]) -> Judgement:
    result = pick(others, here.claim.experiment, here.claim.profiles, "any")
    judged = judge(here.claim, result)
    if result is None or judged.verdict == Verdict.NOT_RUN:
        return here
    return replace(judged, measured=f"{judged.measured} on {result.slug}")


def count_verdicts(claims: Iterable[Claim], results: Iterable[Result], machine: str) -> dict[str, int]:
    """How often each verdict falls, as in ``judge_record``."""
    verdicts = [judgement.verdict for judgement in judge_record(claims, results, machine)]
    return {str(verdict): verdicts.count(verdict) for verdict in Verdict}


def _exact(claim: Claim, found: list[dict[str, Any]]) -> tuple[Verdict, str]:
    measured, value = found[0]["value"], claim.value
    if is_number(measured) and is_number(value):
        off = abs(measured - value)
        right = off <= claim.tolerance or math.isclose(off, claim.tolerance, rel_tol=1e-9)
        return (Verdict.REPRODUCED if right else Verdict.FAILED), f"differs by {off:.3g}"
    same = type(measured) is type(value) and measured == value
    return (Verdict.REPRODUCED, "equal") if same else (Verdict.FAILED, "differs")


def _ratio(claim: Claim, found: list[dict[str, Any]]) -> tuple[Verdict, str]:
    low, share, _ = effect(claim, found[0])
    off = abs(share - 1)
    if low <= 0:
        return Verdict.FAILED, "no effect, or opposite" if share <= 0 else "the interval reaches no effect"
    if off <= claim.tolerance or math.isclose(off, claim.tolerance, rel_tol=1e-9):
        return Verdict.REPRODUCED, f"off by {off:.0%} of the effect"
    if _alike(share):
        return Verdict.TREND, f"right sign, off by {off:.0%} of the effect"
    return Verdict.FAILED, f"right sign, {share:.2g} times the effect"


def _bound(claim: Claim, found: list[dict[str, Any]]) -> tuple[Verdict, str]:
    entry, sign = found[0], 1 if claim.op == ">=" else -1
    bounds = [sign * (entry.get(name, entry["value"]) - claim.value) for name in ("low", "high")]
    if min(bounds) >= 0:
        return Verdict.REPRODUCED, f"holds for {'the whole interval' if 'low' in entry else 'the value'}"
    if max(bounds) >= 0:
        return Verdict.TREND, "the interval lies across the bound"
    if claim.no_effect is not None:
        low, share, _ = effect(claim, entry)
        if low > 0 and _alike(share):
            return Verdict.TREND, f"right sign, {share:.2g} times the effect asked for"
    return Verdict.FAILED, "outside the bound"


def effect(claim: Claim, entry: dict[str, Any]) -> tuple[float, float, float]:
    """What was measured as a share of the report's effect: 0 is no effect, 1 the report's; low, value and high."""
    low, value, high = (
        (entry.get(name, entry["value"]) - claim.no_effect) / (claim.value - claim.no_effect)
        for name in ("low", "value", "high")
    )
    return min(low, high), value, max(low, high)


def _alike(share: float) -> bool:
    return 1 / WITHIN <= share <= WITHIN


def _ordering(claim: Claim, found: list[dict[str, Any]]) -> tuple[Verdict, str]:
    if all(a.get("high", a["value"]) < b.get("low", b["value"]) for a, b in pairwise(found)):
        return Verdict.REPRODUCED, "every pair in order, their intervals apart"
    if all(a["value"] < b["value"] for a, b in pairwise(found)):
        return Verdict.TREND, "in order, but intervals overlap"
    return Verdict.FAILED, "not in this order"


_RULES: dict[str, Callable[[Claim, list[dict[str, Any]]], tuple[Verdict, str]]] = {
    "exact": _exact,
    "ratio": _ratio,
    "bound": _bound,
    "ordering": _ordering,
}


def _measured(claim: Claim, found: list[dict[str, Any]]) -> str:
    """Measured values as a short text: value, interval (a range, of fewer than five), n; an ordering in its order."""
    if claim.kind == "ordering":
        return ", ".join(show(entry["value"]) for entry in found)
    entry = found[0]
    beside = claim.value if claim.kind == "bound" else None
    text = f"{show(entry['value'], beside)} {entry.get('unit') or claim.unit}".strip()
    if "low" in entry and entry["low"] != entry["high"]:
        called = "range " if entry.get("range") else ""
        text += f" {called}[{show(entry['low'], beside)}, {show(entry['high'], beside)}]"
    return text + (f", n={entry['n']}" if "n" in entry else "")


def show(value: Any, beside: Any = None) -> str:
    """A value for a table: floats to three significant digits without an exponent where that stays short, and to as
    many more as tell it from the number ``beside``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    if is_number(beside) and value != beside:
        while float(f"{value:.{digits}f}") == beside and digits < 9:
            digits += 1
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
