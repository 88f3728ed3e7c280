"""The figures and the table of notebook 24: who is preempted, and what that does to the tail."""

from __future__ import annotations

import numpy as np

from firsttoken.study.summary import Summary
from firsttoken_studies.nb24_who_is_preempted.study import FREED, LIFO, RANDOM
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import LOOKS, Figure, categories, panels
from firsttoken_studies.record.results import Result, Table
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import cells

LABELS = {
    LIFO: "the last that came (LIFO)",
    "first_arrived": "the first that came",
    "longest": "the one with most tokens",
    "shortest": "the one with fewest tokens",
    "last_admitted": "the last that was admitted (vLLM)",
    "last_but_the_longest": "the last, never the one with most tokens",
    "shortest_but_the_leader": "fewest tokens, never the one with most (unslothai)",
    "most_remaining": "most tokens to say",
    "least_remaining": "fewest tokens to say",
    "least_expected": "fewest tokens expected to come",
    "least_delayed": "least time a token after a pause (ours)",
    "most_blocks_for_its_work": "most blocks a token, most to come (vLLM 56897)",
    FREED: "most blocks freed for its cost",
    RANDOM: "drawn at random",
}


def schematic() -> Schematic:
    """Draw the blocks of three requests, and the two of them that a rule may preempt."""
    alt = (
        "All blocks of the GPU are taken by three requests. A came first, holds most blocks and is nearly done. C came "
        "last, holds few blocks and has just begun. LIFO, the rule of CPS, preempts C. The other rule preempts A."
    )
    sketch = Schematic(20, 6, alt)
    sketch.text(0.2, 0.5, "No KV block is left: which request is preempted?", heading=True)
    for block in range(14):
        name, look = ("A", "measured") if block < 7 else ("B", "other") if block < 11 else ("C", "online")
        sketch.box(2 + block, 1.2, name, look)
    sketch.text(16.5, 1.7, "GPU: all are taken")
    sketch.arrow((5.5, 2.3), (5.5, 3.7))
    sketch.arrow((14.5, 2.3), (14.5, 3.7))
    sketch.text(5.5, 4.2, "A, the first that came?", align="center", heading=True)
    sketch.text(5.5, 5.1, "frees most, and is nearly done", align="center")
    sketch.text(14.5, 4.2, "C, the last that came? (LIFO, CPS)", align="center", heading=True)
    sketch.text(14.5, 5.1, "frees few, and is soon preempted again", align="center")
    return sketch


def victim_rows(result: Result) -> Table:
    """A line a load, scheduler and rule: P99 TPOT by recovery, and the longest wait with swap."""
    recoveries = dict.fromkeys(row["recovery"] for row in result.rows)
    columns = {f"P99 TPOT, {name}, ms": ("tpot_p99_ms", 0, {"policy": name}) for name in recoveries}
    columns |= {"longest wait, swap, s": ("longest_gap_s", 1, {"policy": "swap"})}
    for blocks, scheduler, victim in dict.fromkeys((r["blocks"], r["scheduler"], r["victim"]) for r in result.rows):
        labels = {"case": f"{blocks} blocks", "scheduler": scheduler, "variant": victim}
        load = f"{blocks} blocks, {scheduler}: {LABELS[victim]}"
        yield {"load": load} | cells(result.summary, columns, **labels)


def by_victim(recorded: Result | None, now: Result) -> Figure:
    """P99 TPOT by rule, a panel a scheduler and load, a mark a recovery."""
    drawn_over = over(recorded, now)
    every = [row for shown in drawn_over for row in shown.result.rows]
    schedulers = list(dict.fromkeys(row["scheduler"] for row in every))
    pools = sorted({row["blocks"] for row in every}, reverse=True)
    rules = list(dict.fromkeys(row["victim"] for row in every))
    recoveries = list(dict.fromkeys(row["recovery"] for row in every))
    size = (9, 0.3 * len(rules) * len(pools) + 2.4)
    fig, axes = panels(len(pools), len(schedulers), figsize=size, sharex="col", sharey=True, squeeze=False)
    for line, blocks in zip(axes, pools, strict=True):
        for ax, scheduler in zip(line, schedulers, strict=True):
            for shown in drawn_over:
                for index, victim in enumerate(rules):
                    for offset, recovery in zip((-0.27, -0.09, 0.09, 0.27), recoveries, strict=False):
                        labels = {"case": f"{blocks} blocks", "scheduler": scheduler, "policy": recovery}
                        entry = shown.result.summary.get("tpot_p99_ms", **labels, variant=victim)
                        position, look = index + offset + shown.shift / 3, recovery.replace("_", "-")
                        shown.point(ax, position, entry, look, along="x", share=1 / 3)
            ax.set_title(f"{scheduler}, {blocks} blocks", fontsize="small")
            categories(ax, [LABELS[victim] for victim in rules], 0.4, fontsize="small")
    for ax in axes[-1]:
        ax.set_xlabel("P99 TPOT, ms")
    for recovery in recoveries:
        look = LOOKS[recovery.replace("_", "-")]
        axes[0][0].plot([], [], linestyle="none", marker=look.marker, color=look.colour, label=recovery)
    fig.suptitle(_message((recorded or now).summary))
    names = fig.legend(loc="outside lower center", ncols=3, fontsize="small")
    name_results(fig, drawn_over, "tpot_p99_ms", legend=names)
    return fig


def _message(summary: Summary) -> str:
    """Say how far the best rule with plain swap lies below LIFO with cross-point, over the loads of the first
    scheduler."""
    than = f"{LIFO} cross_point"
    entries = summary.all("tpot_p99_below_pct", policy="swap", than=than)
    first = [entry for entry in entries if entry["where"]["scheduler"] == entries[0]["where"]["scheduler"]]
    best: dict[str, float] = {}
    for entry in first:
        rule = entry["where"]["variant"]
        best[rule] = min(best.get(rule, np.inf), entry["value"])
    if not best:
        return "The tail by who gives way and how it comes back"
    rule = max(best, key=lambda name: best[name])
    most = max(entry["value"] for entry in first if entry["where"]["variant"] == rule)
    return f"Swap alone, of {LABELS[rule]}, has its tail {best[rule]:.0f} to {most:.0f} % below LIFO with cross-point"
