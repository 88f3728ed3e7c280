"""What the answers of all methods come to: the chosen group, its speed-up, and what each method loses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firsttoken.droidspeak.prefill import Group
from firsttoken.droidspeak.profile.pareto import Profiled, smallest_within
from firsttoken.droidspeak.profile.transfer import resampled
from firsttoken.study.measures import Summary
from firsttoken.study.record import Rows
from firsttoken.study.stats import Interval, bootstrap, paired_bootstrap
from firsttoken_studies.droidspeak.methods import (
    BLEND,
    CHOOSE,
    COMPUTE,
    DROIDSPEAK,
    JUDGE,
    LATENCY,
    OWN,
    REUSE,
    decoded_groups,
    where_of,
)
from firsttoken_studies.droidspeak.profiling import BOUND
from firsttoken_studies.droidspeak.setting import rows_by_run, run_of

# where the measures of the chosen group hold, and those of the group that token accuracy would choose
DECODED, ACCURACY = ({"method": DROIDSPEAK, "chosen_by": by} for by in ("decoded answers", "token accuracy"))
ABOVE_BLEND = {"method": DROIDSPEAK, "than": BLEND}
_CHOICES, _MEANS = 200, 2000  # samples of the items that choose, and of those that judge


def methods_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """What each method scores and loses in each run, and over the runs the chosen group and the lead over CacheBlend.

    Means over runs keep the runs and draw the items again, those that choose and those that judge. Layers and speed-up
    are of the runs in which something must be recomputed; of all, where that is none.
    """
    summary, runs = Summary(), list(rows_by_run(rows).values())
    choices = [choice_of(of) for of in runs]
    for of, choice in zip(runs, choices, strict=True):
        _add_scores(summary, of)
        _add_choice(summary, choice, run_of(of[0]))
        _add_by_accuracy(summary, of)
    for method in (REUSE, DROIDSPEAK):
        lost = [summary.of("relative_loss_pct", method=method, **run_of(of[0])) for of in runs]
        worst = max(lost, key=lambda entry: entry["value"])
        summary.add("relative_loss_pct", worst, method=method, across="worst")
    mended = [choice for choice in choices if len(choice.group)] or choices
    layers = _over(mended, "shares", np.mean).summary("% of layers", 100)
    summary.add("group_layers_pct", layers, **DECODED, across="mean")
    by_accuracy = zip(summary.all("speedup_x", **ACCURACY), choices, strict=True)
    gains = [entry["value"] for entry, choice in by_accuracy if len(choice.group)]
    summary.add("speedup_x", _over(mended, "gains", np.mean).summary("x"), **DECODED, across="mean")
    summary.add("speedup_x", _over(mended, "gains", np.min).summary("x"), **DECODED, across="least")
    if gains:
        summary.add("speedup_x", bootstrap(gains).summary("x"), **ACCURACY, across="mean")
    for equal in (COMPUTE, LATENCY):
        leads = [lead for of in runs if (lead := _leads(of, equal)) is not None]
        if leads:
            mean = _mean_of(leads).summary("points", 100)
            summary.add("score_above_points", mean, **ABOVE_BLEND, case=equal, across="mean")
    return summary


@dataclass(frozen=True)
class ChosenGroup:
    """The group that a run's items choose by decoded answers, and those that they would choose if drawn again.

    ``shares`` and ``gains`` [1 + draws] are shares of the layers, and how many times earlier the first token comes: of
    the choice first, its gain a median over rounds, then of every other choice, each timed in a round drawn at random.
    """

    group: Group
    items: int
    shares: np.ndarray
    gains: np.ndarray


def choice_of(rows: Rows) -> ChosenGroup:
    """The choice of one run, from its rows."""

    def choose(drawn: Sequence[Profiled]) -> Profiled:
        return smallest_within(drawn, BOUND)

    groups, depth, rng = decoded_groups(rows), rows[0]["depth"], np.random.default_rng(0)
    times = {(r["lo"], r["hi"]): np.array(r["time_share"]) for r in rows if r["items"] == CHOOSE}
    chosen, items = choose(groups).group, len(groups[0].own)
    again = [draw.group for draw in resampled(groups, items, choose, draws=_CHOICES)]
    gains = [float(np.median(1 / times[chosen.lo, chosen.hi])), *(1 / rng.choice(times[g.lo, g.hi]) for g in again)]
    return ChosenGroup(chosen, items, np.array([len(group) / depth for group in (chosen, *again)]), np.array(gains))


def _over(choices: Sequence[ChosenGroup], what: str, stat: Callable[..., np.ndarray]) -> Interval:
    """``stat`` over runs of a field of what was chosen, with its interval over what might have been, draw by draw."""
    estimate, *again = stat([getattr(choice, what) for choice in choices], axis=0)
    low, high = np.percentile(again, [2.5, 97.5])
    return Interval(float(estimate), float(low), float(high), min(choice.items for choice in choices))


def _add_choice(summary: Summary, choice: ChosenGroup, run: dict[str, str]) -> None:
    layers, gain = (_over([choice], what, np.mean) for what in ("shares", "gains"))
    group = {"value": str(choice.group), "n": choice.items, "unit": "layers"}
    summary.add("group", group, **DECODED, **run)
    summary.add("group_layers_pct", layers.summary("% of layers", 100), **DECODED, **run)
    summary.add("speedup_x", gain.summary("x"), **DECODED, **run)


def _add_by_accuracy(summary: Summary, rows: Rows) -> None:
    """The smallest group that keeps to the bound by token accuracy: its speed-up, and what its decoded answers lose."""
    candidates = [row for row in rows if row["items"] == CHOOSE]
    own = next(row for row in candidates if row["method"] == OWN)["item_score"]
    within = [row for row in candidates if row["accuracy_lost_pct"] <= 100 * BOUND]
    row = min(within, key=lambda row: (row["hi"] - row["lo"], row["accuracy_lost_pct"]))
    lost = bootstrap(np.column_stack([own, row["item_score"]]), _relative_loss)
    gain = bootstrap(1 / np.array(row["time_share"]), "median")
    group = {"value": str(Group(row["lo"], row["hi"])), "n": row["n"], "unit": "layers"}
    summary.add("group", group, **ACCURACY, **run_of(row))
    summary.add("relative_loss_pct", lost.summary("% of own", 100), **ACCURACY, **run_of(row))
    summary.add("speedup_x", gain.summary("x"), **ACCURACY, **run_of(row))


def _mean_of(runs: Sequence[np.ndarray]) -> Interval:
    """The mean over runs of the means of their items, with its interval over items, the runs as they are."""
    rng = np.random.default_rng(0)
    drawn = [values[rng.integers(0, len(values), (_MEANS, len(values)))].mean(1) for values in runs]
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    return Interval(float(np.mean([v.mean() for v in runs])), float(low), float(high), min(map(len, runs)))


def _leads(rows: Rows, equal: str) -> np.ndarray | None:
    """[items]: score of the chosen group above CacheBlend's, the better of its ways where they are ``equal``.

    None where no CacheBlend was asked so.
    """
    judged = {row["method"]: row for row in rows if row["items"] == JUDGE}
    blends = [row for name, row in judged.items() if where_of(name).get("case") == equal]
    if not blends:
        return None
    best = max(blends, key=lambda row: row["score"])
    return np.array(judged[DROIDSPEAK]["item_score"]) - np.array(best["item_score"])


def _add_scores(summary: Summary, rows: Rows) -> None:
    """The scores of a run, what each method loses against the receiver's own prefill, and the leads over CacheBlend."""
    run, judged = run_of(rows[0]), {row["method"]: row for row in rows if row["items"] == JUDGE}
    own = judged[OWN]["item_score"]
    for name, row in judged.items():
        where = where_of(name) | run
        summary.add("score_pct", bootstrap(row["item_score"]).summary("%", 100), **where)
        if name != OWN:
            summary.add("loss_points", paired_bootstrap(own, row["item_score"]).summary("points", 100), **where)
            relative = bootstrap(np.column_stack([own, row["item_score"]]), _relative_loss)
            summary.add("relative_loss_pct", relative.summary("% of own", 100), **where)
    for equal in (COMPUTE, LATENCY):
        if (lead := _leads(rows, equal)) is not None:
            entry = bootstrap(lead).summary("points", 100)
            summary.add("score_above_points", entry, **ABOVE_BLEND, case=equal, **run)


def _relative_loss(scores: np.ndarray) -> float:
    """Of [items, 2], own and other score: the share of the own that is lost."""
    own, other = scores.mean(0)
    return float(1 - other / own) if own else 0.0
