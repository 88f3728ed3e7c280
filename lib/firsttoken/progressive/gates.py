"""From rows to verdicts: scores of each variant, losses against the full model, shares recovered, the report's gates.

A variant is a stage with a recipe: "s0" the full model, "s1_none" stage 1 without healing, "s2_ours", ... Rows of two
variants hold the same items in the same order, so every difference is paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from firsttoken.study.record import Rows
from firsttoken.study.stats import bootstrap, paired_bootstrap

Summary = dict[str, dict[str, Any]]

EXTRACTIVE, CLOSED_BOOK = "extractive", "closed_book"
SCORES = {"em": "em", "f1": "f1", "choice": "choice_correct"}  # columns of the judged task
GATES = {"s1": 3.0, "s2": 3.0, "s3": 1.0}
"""Points of EM and of F1 that a stage may lose (ProgressiveServe, 3.1.2)."""


def column(rows: Rows, variant: str, task: str, name: str) -> np.ndarray:
    """The values [items] of one column of one variant's rows of one task, in recorded order."""
    return np.array([r[name] for r in rows if r["variant"] == variant and r["task"] == task and name in r])


def summarise(rows: Rows, baseline: str = "s0", judged: str = EXTRACTIVE) -> Summary:
    """Scores of every variant in %, perplexity, nats an answer token; drops against ``baseline`` in points.

    ``em``, ``f1`` and the drops are those of the task ``judged``; any task that was asked has its own by its name too.
    """
    found: Summary = {}
    for variant in dict.fromkeys(r["variant"] for r in rows):
        for score, name in SCORES.items():
            values = column(rows, variant, judged, name)
            if not len(values):
                continue
            found[f"{score}_{variant}"] = bootstrap(values).summary("%", 100)
            if variant != baseline:
                drop = paired_bootstrap(column(rows, baseline, judged, name), values)
                found[f"{score}_drop_{variant}"] = drop.summary("points", 100)
        found[f"answer_nll_{variant}"] = bootstrap(column(rows, variant, judged, "answer_nll")).summary("nats")
        found[f"perplexity_{variant}"] = bootstrap(column(rows, variant, "text", "text_nll"), exp_mean).summary()
        for task in (CLOSED_BOOK, EXTRACTIVE) if judged == CLOSED_BOOK else (CLOSED_BOOK,):
            for name in ("f1", "em"):
                values = column(rows, variant, task, name)
                if len(values):
                    found[f"{task}_{name}_{variant}"] = bootstrap(values).summary("%", 100)
    return found


def recoveries(rows: Rows, recipes: Sequence[str], judged: str = EXTRACTIVE) -> Summary:
    """The share of what pruning lost that healing brings back, in %, by model (a stage, a control), recipe and score.

    A model has a share where it was asked unhealed too: as "s1_none" beside "s1_ours". 0 is the pruned model without
    healing, 100 the full one. Perplexity is compared by its logarithm.
    """
    found: Summary = {}
    unhealed = [variant for variant in dict.fromkeys(r["variant"] for r in rows) if variant.endswith("_none")]
    for stage in (variant.removesuffix("_none") for variant in unhealed):
        for recipe in recipes:
            for score, task, name in (
                ("em", judged, "em"),
                ("f1", judged, "f1"),
                ("log_perplexity", "text", "text_nll"),
            ):
                parts = [column(rows, v, task, name) for v in (f"{stage}_none", f"{stage}_{recipe}", "s0")]
                if len({len(p) for p in parts}) == 1 and len(parts[0]) and parts[0].mean() != parts[2].mean():
                    share = bootstrap(np.stack(parts, 1), share_recovered)
                    found[f"{score}_recovered_{stage}_{recipe}"] = share.summary("% of the loss", 100)
    return found


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
