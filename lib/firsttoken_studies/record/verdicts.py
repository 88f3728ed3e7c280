"""Judges a claim by a result: the verdict depends on the interval of what was measured.

A ratio is *reproduced* where the whole interval of the effect lies within the tolerance, and is a *trend* where the
interval excludes no effect and the effect is within a factor of two of the report's; of a share of a whole, what is
left of the whole must be within that factor, too, so that a loss of 99 % is no trend of one of 50 %. A bound is
reproduced where the whole interval keeps to it, and a trend also where it lies across. An ordering is reproduced where
each value is at least a tenth above the one before, their intervals apart, and a trend where it only is in order. All
else is *not reproduced*. Fewer than five observations are too few to judge what was measured; a byte count or a product
of published numbers needs none.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from firsttoken.study.stats import FEWEST
from firsttoken.study.summary import named
from firsttoken_studies.record.claims import Claim, is_number
from firsttoken_studies.record.record_log import EMPTY, ClaimRecord, Log, forms
from firsttoken_studies.record.results import Result, pick

TOLERANCE = 0.25  # of the effect, for every ratio; a claim may set a narrower one, and says why
WITHIN = 2.0  # an effect is of the report's size where neither is more than so many times the other
RECORDED_UNDER = ("full", "gpu", "paper")  # profiles whose results are the record; no other makes machines differ
LEAST_STEP = 0.1  # by which each value of an ordering is above the one before, as a share of the larger


class Verdict(StrEnum):
    """A verdict on a claim."""

    REPRODUCED = "reproduced"
    TREND = "trend only"
    FAILED = "not reproduced"
    DIFFERS = "machine-dependent"
    TOO_FEW = "n too small to judge"
    NOT_RUN = "not run here"

    @property
    def judged(self) -> bool:
        """Return whether the verdict says anything of the claim."""
        return self not in (Verdict.TOO_FEW, Verdict.NOT_RUN)


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, what was measured (as text), and the reason in a few words.

    ``standing`` is "post hoc" where the claim is not the one that stood in the ledger when the run began, and
    "unverifiable" where the history does not have the revision that ran. ``reworded``: its words were changed since.
    ``measured`` names the machine where it is not the one that was asked for. ``share`` is what was measured in parts
    of the report's effect, where the claim says what no effect would be, and ``value`` the plain number of a bound.
    """

    claim: Claim
    measured: str
    verdict: Verdict
    why: str
    standing: str = ""
    reworded: bool = False
    share: float | None = None
    value: float | None = None

    @property
    def says(self) -> str:
        """The verdict as every table shows it."""
        return f"{self.verdict}, {self.standing}" if self.standing else str(self.verdict)

    @property
    def content(self) -> dict[str, Any]:
        """The verdict with its claim, for programs."""
        return asdict(self) | {"verdict": str(self.verdict)}


def judge(claim: Claim, result: Result | None, log: Log = EMPTY) -> Judgement:
    """Return the verdict on ``claim`` from ``result``; "not run here" without one, or when it lacks the measure.

    The claim's form at the beginning of the run is known from ``log``, where that has a line of the run, and else from
    the digests in the result.
    """
    if result is None:
        return Judgement(claim, "", Verdict.NOT_RUN, f"no result of {claim.experiment}")
    absent = [
        named(claim.measure, labels) for labels in claim.places if not result.summary.get(claim.measure, **labels)
    ]
    if absent:
        return Judgement(claim, "", Verdict.NOT_RUN, f"the result of {claim.experiment} has no {', '.join(absent)}")
    entries = [result.summary.of(claim.measure, **labels) for labels in claim.places]
    if claim.kind != "exact" and not all(is_number(entry["value"]) for entry in entries):
        return Judgement(claim, "", Verdict.NOT_RUN, f"{claim.measure} must be a number")
    verdict, why = judge_entries(claim, entries)
    share = None if claim.no_effect is None or claim.kind == "ordering" else effect(claim, entries[0])[1]
    value = entries[0]["value"] if claim.kind == "bound" else None
    line = log.standing.get((result.experiment, result.profile, result.slug))
    answer = line.claims.get(claim.id) if line and line.started == result.started else None
    standing, reworded = _standing(claim, result, answer)
    return Judgement(claim, _measured(claim, entries), verdict, why, standing, reworded, share, value)


def _standing(claim: Claim, result: Result, answer: ClaimRecord | None) -> tuple[str, bool]:
    if answer is None:
        return ("" if result.entries.get(claim.id) == claim.digest else "post hoc"), False
    required, worded = forms(claim)
    if answer.fixed == "unknown":
        return "unverifiable", False
    before = answer.fixed == "before" and answer.asked == required
    return ("" if before else "post hoc"), answer.reworded or answer.worded != worded


def judge_entries(claim: Claim, entries: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    """The verdict on ``claim`` from the entries at its places, and the reason in a few words."""
    counts = [entry["n"] for entry in entries if "n" in entry]
    if claim.nature == "measured" and counts and min(counts) < FEWEST:
        return Verdict.TOO_FEW, f"n = {min(counts)}: too few to judge"
    return _RULES[claim.kind](claim, entries)


def judge_all(claims: Iterable[Claim], results: Iterable[Result], machine: str | None = None) -> list[Judgement]:
    """One judgement a claim, from the result that ``results.pick`` prefers on ``machine`` (None: this machine)."""
    results = list(results)
    return [judge(claim, pick(results, claim.experiment, claim.profiles, machine)) for claim in claims]


def judge_record(claims: Iterable[Claim], results: Iterable[Result], machine: str, log: Log = EMPTY) -> list[Judgement]:
    """Judge as ``judge_all`` does, and beside it by the last result of every other machine without a GPU; a machine
    whose result was removed counts by its line in ``log``.

    An experiment that only another machine has recorded is judged by that, which ``measured`` says; one that only
    machines with a GPU have recorded, by those. Where the machines differ the verdict is that it depends on the
    machine, and each is named with its own. No verdict mixes two machines.
    """
    results = list(results)
    gpus = {result.slug for result in results if result.machine["gpu"]}
    others = sorted({result.slug for result in results} - gpus - {machine})
    by_claim = [_by_machines(claim, results, (machine, *others), log) for claim in claims]
    return [
        _by_machines(judged.claim, results, (machine, *sorted(gpus)), log)
        if judged.verdict == Verdict.NOT_RUN and gpus
        else judged
        for judged in by_claim
    ]


def _by_machines(claim: Claim, results: Sequence[Result], machines: Sequence[str], log: Log) -> Judgement:
    by = {slug: judge(claim, pick(results, claim.experiment, claim.profiles, slug), log) for slug in machines}
    by_slug = {slug: judged for slug, judged in by.items() if judged.verdict != Verdict.NOT_RUN}
    for line, answer in log.answers(claim):
        if line.machine not in by_slug and not line.gpu and answer.fixed != "other" and answer.asked == forms(claim)[0]:
            verdict, why = judge_entries(claim, answer.entries)
            by[line.machine] = Judgement(claim, _measured(claim, answer.entries), verdict, why)
    recorded_slugs = {result.slug for result in results if result.profile in RECORDED_UNDER} | {
        line.machine for line in log.runs()
    }
    judged = {slug: judgement for slug, judgement in by.items() if judgement.verdict.judged and slug in recorded_slugs}
    if len({judgement.verdict for judgement in judged.values()}) > 1:
        measured = "; ".join(
            f"{judgement.measured} on {slug}: {judgement.verdict}" for slug, judgement in judged.items()
        )
        first = next(iter(judged.values()))
        return replace(first, measured=measured, verdict=Verdict.DIFFERS, why=f"{len(judged)} machines differ")
    first = next(iter(by_slug), None)
    if first is None:
        return by[machines[0]]
    own_judgement = by_slug[first]
    return (
        own_judgement
        if first == machines[0]
        else replace(own_judgement, measured=f"{own_judgement.measured} on {first}")
    )


def count_verdicts(
    claims: Iterable[Claim], results: Iterable[Result], machine: str, log: Log = EMPTY
) -> dict[str, int]:
    """Return the number of claims with each verdict, as in ``judge_record``."""
    verdicts = [judgement.verdict for judgement in judge_record(claims, results, machine, log)]
    return {str(verdict): verdicts.count(verdict) for verdict in Verdict}


def _exact(claim: Claim, entries: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    measured, value = entries[0]["value"], claim.value
    if is_number(measured) and is_number(value):
        off = abs(measured - value)
        right = off <= claim.tolerance or math.isclose(off, claim.tolerance, rel_tol=1e-9)
        return (Verdict.REPRODUCED if right else Verdict.FAILED), f"differs by {off:.3g}"
    same = type(measured) is type(value) and measured == value
    return (Verdict.REPRODUCED, "equal") if same else (Verdict.FAILED, "differs")


def _ratio(claim: Claim, entries: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    low, share, high = effect(claim, entries[0])
    off, tolerance = abs(share - 1), min(claim.tolerance, TOLERANCE) + 1e-9
    if low <= 0:
        return Verdict.FAILED, "no effect, or opposite" if share <= 0 else "the interval reaches no effect"
    if low >= 1 - tolerance and high <= 1 + tolerance:
        return Verdict.REPRODUCED, f"off by {off:.0%} of the effect"
    if not _alike(claim, share, entries[0]):
        return Verdict.FAILED, f"right sign, {share:.2g} times the effect"
    if off <= tolerance:
        return Verdict.TREND, f"off by {off:.0%} of the effect, but its interval leaves the tolerance"
    return Verdict.TREND, f"right sign, off by {off:.0%} of the effect"


def _bound(claim: Claim, entries: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    entry, sign = entries[0], 1 if claim.op == ">=" else -1
    bounds = [sign * (entry.get(name, entry["value"]) - claim.value) for name in ("low", "high")]
    if min(bounds) >= 0:
        return Verdict.REPRODUCED, f"holds for {'the whole interval' if 'low' in entry else 'the value'}"
    if max(bounds) >= 0:
        return Verdict.TREND, "the interval lies across the bound"
    if claim.no_effect is not None:
        low, share, _ = effect(claim, entry)
        if low > 0 and _alike(claim, share, entry):
            return Verdict.TREND, f"right sign, {share:.2g} times the effect asked for"
    return Verdict.FAILED, "outside the bound"


def effect(claim: Claim, entry: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the measured effect as a share of the report's: 0 is no effect, 1 the report's; low, value and high."""
    low, value, high = (
        (entry.get(name, entry["value"]) - claim.no_effect) / (claim.value - claim.no_effect)
        for name in ("low", "value", "high")
    )
    return min(low, high), value, max(low, high)


def _alike(claim: Claim, share: float, entry: Mapping[str, Any]) -> bool:
    """Return whether an effect is of the report's size, and for a share of a whole also whether the rest of the whole
    is."""
    shares = [share]
    if claim.unit.startswith("%") and claim.no_effect == 0 and 0 < claim.value < 100:
        shares.append((100 - entry["value"]) / (100 - claim.value))
    return all(1 / WITHIN <= ratio <= WITHIN for ratio in shares)


def _ordering(claim: Claim, entries: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    if not all(a["value"] < b["value"] for a, b in pairwise(entries)):
        return Verdict.FAILED, "not in this order"
    if not all(a.get("high", a["value"]) < b.get("low", b["value"]) for a, b in pairwise(entries)):
        return Verdict.TREND, "in order, but intervals overlap"
    steps = [(b["value"] - a["value"]) / max(abs(a["value"]), abs(b["value"])) for a, b in pairwise(entries)]
    if min(steps) < LEAST_STEP:
        return Verdict.TREND, f"in order, but one step is {min(steps):.1%}"
    return Verdict.REPRODUCED, "every pair in order, their intervals apart"


_RULES: dict[str, Callable[[Claim, Sequence[Mapping[str, Any]]], tuple[Verdict, str]]] = {
    "exact": _exact,
    "ratio": _ratio,
    "bound": _bound,
    "ordering": _ordering,
}


def _measured(claim: Claim, entries: Sequence[Mapping[str, Any]]) -> str:
    """Measured values as a short text: value, interval (a range, of fewer than five), n; an ordering in its order."""
    if claim.kind == "ordering":
        return ", ".join(show(entry["value"]) for entry in entries)
    entry = entries[0]
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


def compared(value: float, other: float, less: str, more: str) -> str:
    """Return ``less`` ("sooner") where ``value`` is smaller than ``other``, else ``more`` ("later").

    Sentences and titles take their direction from here, so that none contradicts the numbers beside it.
    """
    return less if value < other else more
