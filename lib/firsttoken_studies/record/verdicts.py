"""Judges a claim by a result: the verdict depends on the interval of what was measured.

A ratio is *reproduced* where the whole interval of the effect lies within the tolerance, and is a *trend* where the
interval excludes no effect and the effect is within a factor of two of the report's; of a share of a whole, what is
left of the whole must be within that factor, too, so that a loss of 99 % is no trend of one of 50 %. A bound is
reproduced where the whole interval keeps to it, and a trend also where it lies across. An ordering is reproduced where
each value is at least a tenth above the one before, their intervals apart, and a trend where it only is in order. All
else is *not reproduced*, and where a row of ``data/errata.md`` shows that the statement cannot hold, the *sources
contradict themselves*. Fewer than five observations are too few to judge what was measured; a byte count or a product
of published numbers needs none. A claim that counts as another, whose number answers it as well, is judged there.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
RECORDED_UNDER = ("full", "gpu", "paper", "tasks")  # whose results are the record; no other makes machines differ
SAME = 1e-4  # of a number, within which two are the same; no two of a report were nearer by chance
LEAST_STEP = 0.1  # by which each value of an ordering is above the one before, as a share of the larger


class Verdict(StrEnum):
    """A verdict on a claim."""

    REPRODUCED = "reproduced"
    TREND = "trend only"
    FAILED = "not reproduced"
    CONTRADICTED = "sources contradict themselves"
    DIFFERS = "machine-dependent"
    TOO_FEW = "n too small to judge"
    NOT_RUN = "not run here"
    ELSEWHERE = "counted elsewhere"

    @property
    def judged(self) -> bool:
        """Return whether the verdict says anything of the claim."""
        return self not in (Verdict.TOO_FEW, Verdict.NOT_RUN, Verdict.ELSEWHERE)


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, what was measured (as text), and the reason in a few words.

    ``standing`` is "post hoc" where the claim is not the one that stood in the ledger when the run began or was written
    in view of its number, and "unverifiable" where the history does not have the revision that ran. ``reworded``: its
    words were changed since. ``measured`` names the machine where it is not the one that was asked for, and ``others``
    is what further machines of the record measured. ``share`` is what was measured in parts of the report's effect,
    where the claim says what no effect would be, and ``value`` the plain number of a bound.
    """

    claim: Claim
    measured: str
    verdict: Verdict
    why: str
    standing: str = ""
    reworded: bool = False
    share: float | None = None
    value: float | None = None
    others: str = ""

    @property
    def says(self) -> str:
        """The verdict as every table shows it."""
        if self.verdict == Verdict.ELSEWHERE:
            return f"{self.verdict} ({self.claim.counts_as})"
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
    line = log.standing.get(result.place)
    answer = line.claims.get(claim.id) if line and line.started == result.started else None
    if answer:
        return _judged(claim, entries, log, *_standing(claim, answer))
    return _judged(claim, entries, log, "" if result.entries.get(claim.id) == claim.digest else "post hoc")


def _judged(
    claim: Claim, entries: Sequence[Mapping[str, Any]], log: Log, standing: str, reworded: bool = False
) -> Judgement:
    """Judge a claim by the entries at its places; a sum that gave the same number before the claim was written makes it
    post hoc, however often it is done again."""
    verdict, why = judge_entries(claim, entries)
    if claim.stands_on != "live" and (claim.first_look or _foreseen(claim, entries, log)):
        standing = "post hoc"
    share = None if claim.no_effect is None or claim.kind == "ordering" else effect(claim, entries[0])[1]
    value = entries[0]["value"] if claim.kind == "bound" else None
    return Judgement(claim, _measured(claim, entries), verdict, why, standing, reworded, share, value)


def _standing(claim: Claim, answer: ClaimRecord) -> tuple[str, bool]:
    required, worded = forms(claim)
    if answer.fixed == "unknown":
        return "unverifiable", False
    before = answer.fixed == "before" and answer.asked == required
    return ("" if before else "post hoc"), answer.reworded or answer.worded != worded


def _foreseen(claim: Claim, entries: Sequence[Mapping[str, Any]], log: Log) -> bool:
    """Return whether a run that is older than the claim as it is has these very values, or the rows of one that has."""
    values = [entry["value"] for entry in entries]
    equal = [
        (line, answer)
        for line, answer in log.answers(claim)
        if answer.fixed != "other" and [entry["value"] for entry in answer.entries] == values
    ]
    rows = {line.rows for line, _ in equal}
    return any(_standing(claim, answer)[0] == "post hoc" for _, answer in equal) or any(
        line.rows in rows and claim.id not in line.claims for line in log.runs()
    )


def judge_entries(claim: Claim, entries: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    """The verdict on ``claim`` from the entries at its places, and the reason in a few words."""
    if claim.counts_as:
        return Verdict.ELSEWHERE, "judged there"
    counts = [entry["n"] for entry in entries if "n" in entry]
    if claim.nature == "measured" and counts and min(counts) < FEWEST:
        return Verdict.TOO_FEW, f"n = {min(counts)}: too few to judge"
    verdict, why = _RULES[claim.kind](claim, entries)
    if verdict == Verdict.FAILED and claim.erratum:
        return Verdict.CONTRADICTED, f"{why} (errata {claim.erratum})"
    return verdict, why


def judge_all(claims: Iterable[Claim], results: Iterable[Result], machine: str | None = None) -> list[Judgement]:
    """One judgement a claim, from the result that ``results.pick`` prefers on ``machine`` (None: this machine)."""
    results = list(results)
    return [judge(claim, pick(results, claim.experiment, claim.profiles, machine)) for claim in claims]


def judge_record(claims: Iterable[Claim], results: Iterable[Result], machine: str, log: Log = EMPTY) -> list[Judgement]:
    """Judge by ``machine`` and beside it by the last result of every other machine; a machine whose result was
    withdrawn answers by its line in ``log``.

    The reports measured on GPUs, so that a machine with a GPU answers before ``machine`` what a report measured. The
    first that can judge a claim answers it, which ``measured`` names where it is not ``machine``. Where the machines
    differ the verdict is that it depends on the machine, and each is named with its own. No verdict mixes two machines.
    """
    results = list(results)
    recorded = {result.slug for result in results if result.profile in RECORDED_UNDER}
    recorded |= {line.machine for line in log.runs()}
    gpus = {result.slug for result in results if result.machine["gpu"]}
    gpus |= {line.machine for line in log.runs() if line.gpu}
    slugs = sorted({machine} | recorded | {result.slug for result in results}, key=lambda slug: (slug in gpus, slug))
    own_first = sorted(slugs, key=lambda slug: slug != machine)
    gpu_first = sorted(own_first, key=lambda slug: slug not in gpus) if machine in recorded else own_first
    return [
        _by_machines(_answers(claim, results, gpu_first if _of_a_gpu(claim) else own_first, log), machine, recorded)
        for claim in claims
    ]


def _of_a_gpu(claim: Claim) -> bool:
    return claim.whose == "report" and claim.nature == "measured"


def _answers(claim: Claim, results: Sequence[Result], slugs: Iterable[str], log: Log) -> dict[str, Judgement]:
    """The judgement by each of the machines ``slugs``, those whose result was withdrawn behind the others."""
    by = {slug: judge(claim, pick(results, claim.experiment, claim.profiles, slug), log) for slug in slugs}
    for slug in [slug for slug, judgement in by.items() if judgement.verdict == Verdict.NOT_RUN]:
        if answer := log.withdrawn_answer(claim, slug):
            del by[slug]
            by[slug] = _judged(claim, answer.entries, log, *_standing(claim, answer))
    return by


def _by_machines(by: Mapping[str, Judgement], machine: str, recorded: Collection[str]) -> Judgement:
    answers = {slug: judgement for slug, judgement in by.items() if judgement.verdict != Verdict.NOT_RUN}
    judged = {slug: judgement for slug, judgement in answers.items() if judgement.verdict.judged and slug in recorded}
    if len({judgement.verdict for judgement in judged.values()}) > 1:
        measured = "; ".join(f"{judgement.measured} on {slug}: {judgement.says}" for slug, judgement in judged.items())
        first_judgement = next(iter(judged.values()))
        return replace(
            first_judgement, measured=measured, verdict=Verdict.DIFFERS, why=f"{len(judged)} machines differ"
        )
    if not answers:
        return by[machine]
    first = next((slug for slug in answers if slug in judged or machine not in recorded), next(iter(answers)))
    answer = answers.pop(first)
    others = "; ".join(
        f"{judgement.measured} on {slug}"
        for slug, judgement in answers.items()
        if slug in recorded and judgement.measured != answer.measured
    )
    calculated = answer.claim.stands_on != "live"  # then it does not matter where
    measured = answer.measured if first == machine or calculated else f"{answer.measured} on {first}"
    return replace(answer, measured=measured, others=others)


def count_verdicts(
    claims: Iterable[Claim], results: Iterable[Result], machine: str, log: Log = EMPTY
) -> dict[str, int]:
    """Return the number of claims with each verdict, as in ``judge_record``."""
    verdicts = [judgement.verdict for judgement in judge_record(claims, results, machine, log)]
    return {str(verdict): verdicts.count(verdict) for verdict in Verdict}


def unjudgeable(claims: Sequence[Claim], results: Iterable[Result]) -> list[str]:
    """Return what no verdict may stand on, in words: a live estimate of ``FEWEST`` observations or more without an
    interval, one number that answers two statements of a report, and a claim that counts as one that does not count.

    Counts and extremes of all that was seen, which an exact claim or an invariant asks for, have no interval.
    """
    messages, numbers, by_id = list[str](), set[tuple[str, float, str]](), {claim.id: claim for claim in claims}
    for claim in claims:
        counted = by_id.get(claim.counts_as)
        if claim.counts_as and (counted is None or counted.counts_as or counted.report != claim.report):
            messages.append(
                f"claim {claim.id} counts as {claim.counts_as}, which is no claim of its report that counts"
            )
    for result, claim in ((result, claim) for result in results for claim in claims):
        if claim.experiment != result.experiment or (claim.profiles and result.profile not in claim.profiles):
            continue
        entries = list(filter(None, (result.summary.get(claim.measure, **labels) for labels in claim.places)))
        estimated = claim.stands_on == "live" and claim.kind != "exact" and not claim.invariant
        if estimated and any(entry.get("n", 0) >= FEWEST and "low" not in entry for entry in entries):
            messages.append(
                f"claim {claim.id}: {claim.measure} of {result.experiment} on {result.slug} has no interval"
            )
        if claim.whose == "report" and claim.kind != "ordering" and not claim.counts_as:
            numbers |= {
                (claim.report, entry["value"], claim.id) for entry in entries if isinstance(entry["value"], float)
            }
    for (report, value, name), (other_report, other, other_name) in pairwise(sorted(numbers)):
        # whole numbers are equal by chance
        if name != other_name and report == other_report and value % 1 and math.isclose(value, other, rel_tol=SAME):
            messages.append(
                f"claims {name} and {other_name} are answered by one number, {show(value)}: let one count as the other"
            )
    return messages


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
    """Measured values as a short text: value, interval (a range, of fewer than five), n; an ordering in its order,
    each value behind what its place alone has."""
    if claim.kind == "ordering":
        values = (f"{name}: {show(entry['value'])}" for name, entry in zip(_differences(claim), entries, strict=True))
        return f"{', '.join(values)} {entries[0].get('unit') or claim.unit}".strip()
    entry = entries[0]
    beside = claim.value if claim.kind == "bound" else None
    text = f"{show(entry['value'], beside)} {entry.get('unit') or claim.unit}".strip()
    if "low" in entry and entry["low"] != entry["high"]:
        called = "range " if entry.get("range") else ""
        text += f" {called}[{show(entry['low'], beside)}, {show(entry['high'], beside)}]"
    return text + (f", n={entry['n']}" if "n" in entry else "")


def _differences(claim: Claim) -> Iterator[str]:
    """Yield, for each place of an ordering, the labels by which it differs from the others, as words."""
    names = dict.fromkeys(name for labels in claim.places for name in labels)
    differing = [name for name in names if len({repr(labels.get(name)) for labels in claim.places}) > 1]
    for labels in claim.places:
        values = {name: labels[name] for name in differing if name in labels}
        words = (value if isinstance(value, str) else f"{name} {show(value)}" for name, value in values.items())
        yield " ".join(words).replace("_", " ")


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
