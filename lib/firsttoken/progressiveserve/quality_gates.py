"""Summarizes rows: scores of each variant, losses against the full model, shares recovered, the report's gates.

Rows name what was asked by a variant: "s0" the full model, "s1_none" stage 1 without healing, "s2_ours", ...
``places`` says where what is found of each holds. Rows of two variants hold the same items in the same order, so every
difference is paired.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np

from firsttoken.study.stats import bootstrap, paired_bootstrap
from firsttoken.study.summary import Rows, Scalar, Summary

Places = Mapping[str, dict[str, Scalar]]  # by variant

EXTRACTIVE, CLOSED_BOOK = "extractive", "closed_book"
SCORES = {"em": "em", "f1": "f1", "choice": "choice_correct"}  # columns of the judged task
GATES = {1: 3.0, 2: 3.0, 3: 1.0}
"""By stage, the points of EM and of F1 that it may lose (ProgressiveServe, 3.1.2)."""


def column(rows: Rows, variant: str, task: str, name: str) -> np.ndarray:
    """The values [items] of one column of one variant's rows of one task, in recorded order."""
    return np.array([r[name] for r in rows if r["variant"] == variant and r["task"] == task and name in r])


def summarise(rows: Rows, places: Places, baseline: str = "s0", judged: str = EXTRACTIVE) -> Summary:
    """Scores of every variant in %, perplexity, nats an answer token; drops against ``baseline`` in points.

    Scores and drops without a task are those of the task ``judged``; any task that was asked has its own too.
    """
    summary = Summary()
    for variant in dict.fromkeys(r["variant"] for r in rows):
        index = places[variant]
        for score, name in SCORES.items():
            values = column(rows, variant, judged, name)
            if not len(values):
                continue
            summary.add(f"{score}_pct", bootstrap(values).summary("%", 100), **index)
            if variant != baseline:
                drop = paired_bootstrap(column(rows, baseline, judged, name), values)
                summary.add(f"{score}_drop", drop.summary("points", 100), **index)
        summary.add("answer_nll", bootstrap(column(rows, variant, judged, "answer_nll")).summary("nats"), **index)
        summary.add("perplexity", bootstrap(column(rows, variant, "text", "text_nll"), exp_mean).summary(), **index)
        for task in (CLOSED_BOOK, EXTRACTIVE) if judged == CLOSED_BOOK else (CLOSED_BOOK,):
            for name in ("f1", "em"):
                values = column(rows, variant, task, name)
                if len(values):
                    summary.add(f"{name}_pct", bootstrap(values).summary("%", 100), **index, task=task)
    return summary


def recoveries(rows: Rows, places: Places, judged: str = EXTRACTIVE) -> Summary:
    """The share of what pruning lost that healing brings back, in %, by model (a stage, a control), recipe and score.

    A model has a share where it was asked unhealed too, at the same place with the recipe "none". 0 is the pruned model
    without healing, 100 the full one. Perplexity is compared by its logarithm.
    """
    summary = Summary()
    for pruned, healed in permutations(places, 2):
        if places[pruned] != places[healed] | {"recipe": "none"}:
            continue
        for score, task, name in (("em", judged, "em"), ("f1", judged, "f1"), ("log_perplexity", "text", "text_nll")):
            parts = [column(rows, variant, task, name) for variant in (pruned, healed, "s0")]
            if len({len(p) for p in parts}) == 1 and len(parts[0]) and parts[0].mean() != parts[2].mean():
                share = bootstrap(np.stack(parts, 1), share_recovered)
                summary.add(f"{score}_recovered_pct", share.summary("% of the loss", 100), **places[healed])
    return summary


def share_recovered(parts: np.ndarray) -> float:
    """(healed - pruned) / (full - pruned) of the means of ``parts`` [items, 3]: pruned, healed, full."""
    pruned, healed, full = parts.mean(0)
    return float((healed - pruned) / (full - pruned)) if full != pruned else 0.0


def exp_mean(losses: np.ndarray) -> float:
    """Perplexity from mean losses in nats."""
    return float(np.exp(losses.mean()))


def gate(drop: dict[str, Any], limit: float) -> str:
    """ "met" where the whole interval of the drop is within ``limit`` points, "missed" where none is, else "open"."""
    if drop["high"] <= limit:
        return "met"
    return "missed" if drop["low"] > limit else "open"
