"""Figures and tables of many cold starts at once (notebook 63); all of it is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from firsttoken.study.summary import Entry
from firsttoken_studies.nb63_many_cold_starts.study import ARMS, STAGED, WARM, WHOLE, pool
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import Figure, panels, ticks
from firsttoken_studies.record.results import Result, Rows, Table
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import cells

LOOK = {WHOLE: "S0", STAGED: "S1", WARM: "S3"}  # what is served at first: no stages, the first one, the last one
_LINES = {"fair": "-", "first stages first": "-.", "in turn": "--"}
_KEPT = ("-", "--", "-.", ":")


def schematic() -> Schematic:
    """Draw three replicas that load over one link, whole or in stages."""
    alt = (
        "Three replicas load at once over one link, each at a third of its rate. A replica that loads the whole model "
        "can answer when all layers are there. One that loads in stages can answer when its first stage is there, "
        "which lacks eight layers; the other two stages come behind it."
    )
    sketch = Schematic(18, 7.4, alt)
    sketch.text(0.2, 0.45, "One link, three replicas: each loads at a third of its rate", heading=True)
    for lane in range(3):
        sketch.box(2.8, 1 + 0.8 * lane, "all layers", "S0", width=11.2, height=0.8)
        sketch.box(2.8, 4.2 + 0.8 * lane, "first stage: lacks 8 layers", "S1", width=8.4, height=0.8)
        sketch.box(11.2, 4.2 + 0.8 * lane, "lacks 4", "S2", width=1.4, height=0.8)
        sketch.box(12.6, 4.2 + 0.8 * lane, "all", "S3", width=1.4, height=0.8)
    sketch.text(2.6, 2.2, "whole", align="right")
    sketch.text(2.6, 5.4, "in stages", align="right")
    sketch.arrow((17.8, 2.2), (14.1, 2.2), "first tokens")
    sketch.arrow((11.2, 3.5), (11.2, 4.2))
    sketch.text(11.0, 3.75, "first tokens", align="right")
    sketch.arrow((2.8, 7.0), (17.8, 7.0), "time")
    return sketch


def arm_rows(result: Result, model: str, replicas: int) -> Table:
    """A line an arm: times to the first token, bytes over the link, whose tokens they are, and what was paid for."""
    summary = result.summary
    times = {f"P{q} TTFT, s": (f"ttft_p{q}_s", 2) for q in (50, 95, 99)}
    times |= {"first token, s": ("first_s", 2), "all whole, s": ("whole_s", 1)}
    paid = {
        "tokens of pruned stages, %": ("pruned_pct", 0),
        "seconds / 1,000 requests": ("paid_s", 0),
        "USD / 1,000": ("usd", 2),
    }
    for arm in result.parameters["many_starts"]["arms"]:
        labels = {"model": model, "replicas": replicas, "variant": arm}
        sent = {"GB by stage until then": "bytes_first_gb", "in the burst": "bytes_over_gb"}
        over_link = {head: _parts(summary.all(measure, **labels)) for head, measure in sent.items()}
        yield {"arm": arm} | cells(summary, times, **labels) | over_link | cells(summary, paid, **labels)


def _parts(sent: Sequence[Entry]) -> str:
    return " + ".join(f"{entry['value']:.1f}" for entry in sent) or "0"


def crossing_rows(result: Result) -> Table:
    """A line a model and number of replicas: how long a pool may idle before a cold start is the cheaper one."""
    config = result.parameters["many_starts"]
    cold = [arm for arm in config["arms"] if arm != WARM]
    columns = {f"{arm}, s": ("crossing_s", 1, {"variant": arm, "than": WARM}) for arm in cold}
    for model, count in product(config["systems"], config["replicas"]):
        yield {"model": model, "replicas": count} | cells(result.summary, columns, model=model, replicas=count)


def error_rows(result: Result) -> Rows:
    """A line a recorded case and moment: when it was live, when simulated, and by how much that is off."""
    return [
        {"recorded start": row["case"], "moment": row["moment"], "live, s": f"{row['live_s']:.2f}"}
        | {
            "simulated, s": f"{row['simulated_s']:.2f}",
            "off by, %": f"{100 * (row['simulated_s'] / row['live_s'] - 1):+.1f}",
        }
        for row in result.rows
        if row["what"] == "live"
    ]


def waits(recorded: Result | None, now: Result) -> Figure:
    """P95 of the time to the first token over the number of replicas, a panel a model and a line an arm."""
    models = now.parameters["many_starts"]["systems"]
    fig, axes = panels(1, len(models), figsize=(5.2 * len(models), 4.6), squeeze=False, layout="constrained")
    results = over(recorded, now)
    for ax, model, link in zip(axes[0], models, now.parameters["many_starts"]["gbit_per_s"], strict=True):
        for shown in results:
            config = shown.result.parameters["many_starts"]
            for arm in config["arms"] if model in config["systems"] else ():
                parts, order = ARMS[arm]
                counts = config["replicas"]
                entries = [
                    shown.result.summary.get("ttft_p95_s", model=model, replicas=count, variant=arm) for count in counts
                ]
                label = arm if shown.own or shown.alone else None
                shown.line(ax, counts, entries, LOOK[parts], label=label, linestyle=_LINES[order])
        counts = sorted({count for shown in results for count in shown.result.parameters["many_starts"]["replicas"]})
        ax.set(xscale="log", yscale="log", xlabel="replicas that start together", title=f"{model}, {link:g} Gbit/s")
        ticks(ax.xaxis, counts)
        ax.yaxis.set_major_formatter("{x:g}")
    axes[0][0].set_ylabel("P95 TTFT, s (simulated)")
    fig.suptitle("Stages take off their share; who goes first on the link decides the rest", fontsize=12)
    legend(fig, axes[0][0], results, "ttft_p95_s")
    return fig


def money(recorded: Result | None, now: Result) -> Figure:
    """Money a thousand requests over the mean gap between bursts, for the fewest and the most replicas."""
    config = now.parameters["many_starts"]
    counts = sorted({min(config["replicas"]), max(config["replicas"])})
    shape = len(counts), len(config["systems"])
    size = 4.8 * shape[1], 3.2 * shape[0] + 1
    fig, axes = panels(*shape, figsize=size, squeeze=False, sharex=True, layout="constrained")
    results = over(recorded, now)
    for line, count in zip(axes, counts, strict=True):
        for ax, model in zip(line, config["systems"], strict=True):
            for shown in results:
                theirs = shown.result.parameters["many_starts"]
                styles = list(zip(theirs["keep_alive_s"], _KEPT, strict=False))
                for arm, (keep_alive, style) in product((WHOLE, STAGED), styles):
                    labels = {"model": model, "replicas": count, "variant": arm}
                    entries = [
                        shown.result.summary.get("usd", **labels, case=pool(gap, keep_alive))
                        for gap in theirs["gaps_s"]
                    ]
                    label = f"{arm}, kept {keep_alive:g} s" if shown.own or shown.alone else None
                    shown.line(ax, theirs["gaps_s"], entries, LOOK[arm], label=label, linestyle=style, marker="")
            ax.set(xscale="log", yscale="log", title=f"{model}, {count} replica{'s' * (count > 1)}")
            ax.title.set_fontsize("medium")
            ax.xaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_major_formatter("{x:g}")
        line[0].set_ylabel("USD a thousand requests")
    for ax in axes[-1]:
        ax.set_xlabel("mean gap between bursts, s")
    fig.suptitle("The more replicas share a link, the longer a warm pool is the cheaper one (simulated)", fontsize=12)
    legend(fig, axes[0][0], results, "usd")
    return fig
