"""The tables of notebooks 30 and 31, from results alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from firsttoken.droidspeak.profile.pareto import smallest_within
from firsttoken.study.stats import Interval, bootstrap, paired_bootstrap
from firsttoken_studies.droidspeak.setting import rows_by_run, run_of
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import (
    BOUND,
    critical_of,
    naive_passes,
    profiled_groups,
)
from firsttoken_studies.record.plot import compared
from firsttoken_studies.record.results import Result, Rows, Table, frame_of
from firsttoken_studies.record.show import interval


def by_run(result: Result) -> dict[str, Rows]:
    """The rows of each run, in the order of the profile."""
    return rows_by_run(result.rows)


def losing_runs(result: Result) -> dict[str, Rows]:
    """The runs that full reuse takes out of the bound; all where there is none."""
    runs = by_run(result)
    losing = {run: rows for run, rows in runs.items() if len(smallest_within(profiled_groups(rows), BOUND).group)}
    return losing or runs


def distance_of(result: Result, run_rows: Rows) -> float | None:
    """Return the distance of the weights of a run's pair, % of the sender's; None where that was not recorded."""
    entry = result.summary.get("weight_distance_pct", **run_of(run_rows[0]))
    return entry and entry["value"]


def depth_of(rows: Rows) -> int:
    """Return the number of layers of the receiver of a run's profile."""
    return sum(row["what"] == "layer" for row in rows)


def only(rows: Iterable[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one row of a run's profile that is ``kind``: own, sender, reuse or cost."""
    (row,) = (row for row in rows if row["what"] == kind)
    return row


def layer_losses(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Items' losses of accuracy (0..1) [layers, items] where one layer alone is reused."""
    layers = sorted((row for row in rows if row["what"] == "layer"), key=lambda row: row["lo"])
    return np.array(only(rows, "own")["item_accuracy"]) - np.array([row["item_accuracy"] for row in layers])


def relative_loss(own_scores: Sequence[float], mixed: Sequence[float]) -> Interval:
    """Loss as a share of the receiver's own score, in %, items resampled in pairs; of at least one item above 0."""
    return bootstrap(np.column_stack([own_scores, mixed]), _lost_pct)


def reuse_rows(result: Result) -> Table:
    """Figure 6 in numbers, with the distance of each pair."""
    for run, run_rows in by_run(result).items():
        own_accuracy, reuse, sender = (only(run_rows, kind)["item_accuracy"] for kind in ("own", "reuse", "sender"))
        far = distance_of(result, run_rows)
        line = {"pair and task": run, "weights apart, %": "" if far is None else f"{far:.2f}"}
        for name, values in {"own prefill": own_accuracy, "full reuse": reuse, "sender": sender}.items():
            line[f"{name}, %"] = interval(bootstrap(values).summary(scale=100))
        yield line | {
            "full reuse loses, points": interval(paired_bootstrap(own_accuracy, reuse).summary(scale=100)),
            "relative, %": interval(relative_loss(own_accuracy, reuse).summary()),
            "n": len(own_accuracy),
        }


def sensitivity_rows(result: Result) -> Table:
    """Figures 7 and 8 in numbers: critical layers, the worst one, and the one where items differ most."""
    for run, run_rows in by_run(result).items():
        accuracy = layer_losses(run_rows)
        critical, own_accuracy = critical_of(run_rows), only(run_rows, "own")["accuracy"]
        worst, spread = int(accuracy.mean(1).argmax()), accuracy.std(1)
        yield {
            "pair and task": run,
            "critical layers": ", ".join(map(str, critical)) or "none",
            "share, % (paper: 11)": round(100 * len(critical) / len(accuracy), 1),
            "most sensitive": worst,
            "it alone loses, %": round(100 * float(accuracy.mean(1).max()) / own_accuracy, 1),
            "most variable": int(spread.argmax()),
            "its standard deviation, points": round(100 * float(spread.max()), 1),
        }


def group_rows(result: Result) -> Table:
    """Figure 11 in numbers: the fewest layers within 5 % of the receiver's own score, and within 5 points of it."""
    for run, run_rows in by_run(result).items():
        groups, depth = profiled_groups(run_rows), depth_of(run_rows)
        line: dict[str, Any] = {"run": run}
        for name, chosen in (
            ("5 %", smallest_within(groups, BOUND)),
            ("5 points", smallest_within(groups, BOUND, absolute=True)),
        ):
            line[f"within {name}"] = f"{chosen.group} ({len(chosen.group)} of {depth})"
            line[f"{name}: loss, points"] = interval(chosen.loss.summary(scale=100))
            line[f"{name}: relative, %"] = f"{100 * chosen.relative_loss:.1f}"
        yield line | {"critical, of layers": f"{len(critical_of(run_rows))} of {depth}"}


def transition_rows(result: Result) -> Table:
    """Figure 10 in numbers: means over sets of equally many layers, with intervals over the sets."""
    for run, run_rows in by_run(result).items():
        for count, sets in frame_of(run_rows).groupby("transitions"):
            moved, nats, lost = (bootstrap(sets[name]) for name in ("deviation", "nll_lost", "accuracy_lost"))
            yield {
                "contiguous groups": count,
                "of": run,
                "layers recomputed": len(sets.layers.iloc[0].split(",")),
                "sets": len(sets),
                "output moved, %": interval(moved.summary(scale=100)),
                "likelihood lost, nats": interval(nats.summary(), 2),
                "accuracy lost, points": interval(lost.summary(scale=100)),
            }


def cost_rows(result: Result) -> Table:
    """Yield the cost of a profile in prefills of an item: naive, every group anew; shared, once for every lower edge.

    Computed for 32 layers (the paper's example) and for the model that was profiled; counted in its first run.
    """
    run_rows = next(iter(by_run(result).values()))
    cost, depth = only(run_rows, "cost"), depth_of(run_rows)
    step = min((row["layers"] for row in run_rows if row["what"] == "group" and row["hi"] < depth), default=depth)
    for layers, size in sorted({(32, 1), (32, 2), (depth, 1), (depth, 2), (depth, step)}):
        edges = [*range(0, layers, size), layers]
        shared = 1 + sum(layers - lo for lo in edges[:-1]) / layers  # the sender's prefill leaves the E-caches
        counted = cost["prefix_layers"] / depth if (layers, size) == (depth, step) else None
        yield {
            "layers, group size": f"{layers}, {size}",
            "groups": len(edges) * (len(edges) - 1) // 2,
            "naive, prefills": round(naive_passes(layers, size), 1),
            "one a lower edge, prefills": round(shared, 1),
            "counted, prefills": "" if counted is None else round(counted, 1),
            "measured, s an item": "" if counted is None else round(cost["seconds"] / cost["n"], 2),
        }


def reuse_comparison(result: Result, methods: Result) -> Rows:
    """Paper and measured for full reuse, decoded (``methods``), and single layers; what is counted has no floor."""
    lost = methods.summary.value("relative_loss_pct", method="full reuse", across="worst")
    critical, group = (
        result.summary.value(name, across="mean") for name in ("critical_layers_pct", "group_layers_pct")
    )
    within = "layers recomputed within 5 %, mean over pairs that full reuse takes out of it"
    return compared(
        ("full reuse, the worse pair: loss of its own F1", "> 50 (HotpotQA)", lost, "%"),
        ("critical layers, mean over pairs", "11 (text: 10)", critical, "% of layers"),
        (within, "38 (12 of 32), 34 (11 of 32)", group, "% of layers"),
    )


def cost_comparison(result: Result) -> Rows:
    """Paper and measured for the cost of a profile."""
    run_rows = next(iter(by_run(result).values()))
    cost = only(run_rows, "cost")
    (fewer,) = result.summary.all("prefix_passes_fewer_x")
    naive, shared = (
        result.summary.value("prefix_passes", variant=v, **run_of(run_rows[0])) for v in ("naive", "shared")
    )
    minutes = 50 * cost["seconds"] / cost["n"] / 60
    coarse = "groups of two layers against single ones, layers over a prefix"
    return compared(
        ("a profile of one run, 50 items", "3 h (A100, Llama-3-8B)", minutes, "min"),
        (coarse, "about 3", fewer["value"], "x fewer"),
        ("naive prefills over those that were run", "", naive / shared, "x fewer"),
    )


def _lost_pct(pairs: np.ndarray) -> float:
    own_total, mixed = pairs.sum(0)
    return 100 * (own_total - mixed) / own_total if own_total else 0.0
