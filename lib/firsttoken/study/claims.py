"""What the papers say, held against what was measured.

``data/claims.yaml`` is a list of claims. A claim names the experiment and the measure of its summary that answers it;
the verdict is computed, never written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from firsttoken.study.errors import ClaimsError, ProfileError
from firsttoken.study.profile import build_config, unknown
from firsttoken.study.record import Result, pick


class Verdict(StrEnum):
    """What may be said of a claim."""

    REPRODUCED = "reproduced"
    TREND = "trend only"
    FAILED = "not reproduced"
    NOT_RUN = "not run here"


@dataclass(frozen=True)
class Claim:
    """One statement of a report.

    ``kind`` is "exact" (|measured - value| <= tolerance, or equality of text), "ratio" (tolerance relative to the
    value), "bound" (``op`` "<=" or ">=" the value) or "ordering" (``measure`` lists measures from the smallest to the
    largest). ``notebook`` is its number; the minutes are a reader's and a computer's. ``profiles`` limits which
    profiles may answer, () for all.
    """

    id: str
    report: str
    place: str
    says: str
    kind: str
    measure: str | tuple[str, ...]
    experiment: str
    notebook: str
    human_min: float
    compute_min: float
    conditions: str = ""
    value: float | bool | str | None = None
    unit: str = ""
    op: str | None = None
    tolerance: float = 0.0
    profiles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ClaimsError(f"unknown kind {self.kind!r}; {unknown(self.kind, KINDS)}")
        if isinstance(self.measure, tuple) != (self.kind == "ordering") or len(self.measures) < 1:
            raise ClaimsError("measure must be a list of names for an ordering, and one name otherwise")
        if self.kind == "ordering" and len(self.measures) < 2:
            raise ClaimsError("an ordering needs at least two measures")
        if (self.value is None) != (self.kind == "ordering"):
            raise ClaimsError(f"value must be {'absent' if self.kind == 'ordering' else 'given'} for kind {self.kind}")
        if self.kind in ("ratio", "bound") and not _is_number(self.value):
            raise ClaimsError(f"value must be a number for kind {self.kind}, not {self.value!r}")
        if (self.op in ("<=", ">=")) != (self.kind == "bound"):
            raise ClaimsError('op must be "<=" or ">=" for a bound, and absent otherwise')
        if self.tolerance < 0 or (self.kind == "ratio" and self.tolerance == 0):
            raise ClaimsError(f"tolerance must be positive for a ratio and never negative, not {self.tolerance}")

    @property
    def measures(self) -> tuple[str, ...]:
        return (self.measure,) if isinstance(self.measure, str) else self.measure


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, what was measured (as text), and the reason in a few words."""

    claim: Claim
    measured: str
    verdict: Verdict
    why: str


def load_claims(path: Path, experiments: Iterable[str]) -> list[Claim]:
    """Read the claims file; each claim must name one of ``experiments``.

    Raises ClaimsError with line and id for a duplicate id, an unknown experiment or kind, an unknown or missing key,
    a value of the wrong type, or keys that do not fit the kind.
    """
    known = set(experiments)
    try:
        text = Path(path).read_text(encoding="utf-8")
        node, entries = yaml.compose(text), yaml.safe_load(text)
    except (OSError, yaml.YAMLError) as error:
        raise ClaimsError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ClaimsError(f"{path}: expected a list of claims, each a mapping")
    claims: dict[str, Claim] = {}
    for entry, mark in zip(entries, node.value, strict=True):
        where = f"{Path(path).name}:{mark.start_mark.line + 1}: claim {entry.get('id', 'without an id')}"
        try:
            claim = build_config(Claim, entry, where)
        except ProfileError as error:
            raise ClaimsError(str(error)) from error
        except ClaimsError as error:
            raise ClaimsError(f"{where}: {error}") from error
        if claim.id in claims:
            raise ClaimsError(f"{where}: this id is used twice")
        if claim.experiment not in known:
            raise ClaimsError(f"{where}: no experiment {claim.experiment!r}; {unknown(claim.experiment, known)}")
        claims[claim.id] = claim
    return list(claims.values())


def judge(claim: Claim, result: Result | None) -> Judgement:
    """The verdict on ``claim`` from ``result``; "not run here" without one, or when it lacks the measure."""
    if result is None:
        return Judgement(claim, "", Verdict.NOT_RUN, f"no result of {claim.experiment}")
    absent = [name for name in claim.measures if name not in result.summary]
    if absent:
        return Judgement(claim, "", Verdict.NOT_RUN, f"the result of {claim.experiment} has no {', '.join(absent)}")
    found = [result.summary[name] for name in claim.measures]
    if claim.kind != "exact" and not all(_is_number(entry["value"]) for entry in found):
        return Judgement(claim, "", Verdict.NOT_RUN, f"{', '.join(claim.measures)} must be a number")
    verdict, why = KINDS[claim.kind](claim, found)
    return Judgement(claim, _measured(claim, found), verdict, why)


def judge_all(claims: Iterable[Claim], results: Iterable[Result], machine: str | None = None) -> list[Judgement]:
    """One judgement a claim, from the result that ``record.pick`` prefers on ``machine`` (None: this machine)."""
    results = list(results)
    return [judge(claim, pick(results, claim.experiment, claim.profiles, machine)) for claim in claims]


def count_verdicts(claims: Iterable[Claim], results: Iterable[Result], machine: str | None = None) -> dict[str, int]:
    """How often each verdict falls, as in ``judge_all``."""
    verdicts = [judgement.verdict for judgement in judge_all(claims, results, machine)]
    return {str(verdict): verdicts.count(verdict) for verdict in Verdict}


def _exact(claim: Claim, found: list[dict[str, Any]]) -> tuple[Verdict, str]:
    measured, value = found[0]["value"], claim.value
    if _is_number(measured) and _is_number(value):
        off = abs(measured - value)
        right = off <= claim.tolerance or math.isclose(off, claim.tolerance, rel_tol=1e-9)
        return (Verdict.REPRODUCED if right else Verdict.FAILED), f"differs by {off:.3g}"
    same = type(measured) is type(value) and measured == value
    return (Verdict.REPRODUCED, "equal") if same else (Verdict.FAILED, "differs")


def _ratio(claim: Claim, found: list[dict[str, Any]]) -> tuple[Verdict, str]:
    measured, value = found[0]["value"], claim.value
    off = abs(measured - value) / abs(value) if value else math.inf
    if off <= claim.tolerance or math.isclose(off, claim.tolerance, rel_tol=1e-9):
        return Verdict.REPRODUCED, f"off by {off:.0%}"
    neutral = 1.0 if claim.unit == "x" else 0.0  # a factor of 1 is no effect, and so is a difference of 0
    same_sign = (measured - neutral) * (value - neutral) > 0
    return (Verdict.TREND, f"right sign, off by {off:.0%}") if same_sign else (Verdict.FAILED, "no effect, or opposite")


def _bound(claim: Claim, found: list[dict[str, Any]]) -> tuple[Verdict, str]:
    entry, sign = found[0], 1 if claim.op == ">=" else -1
    worst = entry.get("low" if claim.op == ">=" else "high", entry["value"])
    if sign * (worst - claim.value) >= 0:
        return Verdict.REPRODUCED, f"holds for {'the whole interval' if 'low' in entry else 'the value'}"
    if sign * (entry["value"] - claim.value) >= 0:
        return Verdict.TREND, "the interval crosses the bound"
    return Verdict.FAILED, "outside the bound"


def _ordering(claim: Claim, found: list[dict[str, Any]]) -> tuple[Verdict, str]:
    values = [entry["value"] for entry in found]
    if all(low < high for low, high in pairwise(values)):
        return Verdict.REPRODUCED, "every pair in order"
    if values[0] < values[-1]:
        return Verdict.TREND, "only the ends are in order"
    return Verdict.FAILED, "the ends are in the opposite order"


KINDS: dict[str, Callable[[Claim, list[dict[str, Any]]], tuple[Verdict, str]]] = {
    "exact": _exact,
    "ratio": _ratio,
    "bound": _bound,
    "ordering": _ordering,
}


def _measured(claim: Claim, found: list[dict[str, Any]]) -> str:
    """Measured values as a short text: value, interval, n; an ordering as the values in the paper's order."""
    if claim.kind == "ordering":
        return ", ".join(show(entry["value"]) for entry in found)
    entry = found[0]
    text = f"{show(entry['value'])} {entry.get('unit') or claim.unit}".strip()
    if "low" in entry and entry["low"] != entry["high"]:
        text += f" [{show(entry['low'])}, {show(entry['high'])}]"
    return text + (f", n={entry['n']}" if "n" in entry else "")


def show(value: Any) -> str:
    """A value for a table: floats to three significant digits without an exponent where that stays short."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
