"""Notebook 36: what clients see under load, and the requests a second that keep to an objective, from results alone."""

from __future__ import annotations

from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak.styles import METHODS
from firsttoken_studies.nb36_throughput_under_load.study import FULL, KNEE, OTHER_KNEES, PARTIAL
from firsttoken_studies.record.overlay import DrawnResult, legend, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, panels, ticks
from firsttoken_studies.record.results import Result, Rows, Table, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

PAPER = "2 to 4"  # times the throughput (5.3, Figure 15)
SEEN = {"ttft": "TTFT, s", "tbt": "time between tokens, s", "e2e": "E2E, s"}
TICKS = [digit * 10**power for power in range(-3, 4) for digit in (1, 2, 5)]
DASHES = ("-", "--", "-.")  # of groups, from few layers to many
OBJECTIVES = {"ttft": "mean TTFT", "e2e": "mean E2E"}


def schematic() -> Schematic:
    """Draw one engine's queue under full prefills, and under prefills over another model's cache."""
    alt = (
        "Two timelines of one engine; a new request comes at every tick. Above, each takes a full prefill, and the "
        "third waits for two before it. Below, each computes a group of layers while the other layers' keys and "
        "values come over a link. A prefill ends before the next request comes, so nobody waits."
    )
    sketch = Schematic(18, 7.4, alt)
    sketch.text(0.2, 0.5, "Full prefill: requests wait for those before them", heading=True)
    sketch.text(0.2, 3.5, "Over another model's cache: short prefills, nobody waits", heading=True)
    for request in range(4):
        arrival = 2.6 * request + 3.2
        for y in (1.1, 4.1):
            sketch.arrow((arrival, y - 0.1), (arrival, y + 0.5))
        start = 3.2 + 4.6 * request
        if request < 3:
            sketch.box(start, 1.6, "ABC"[request], "recompute", width=4.6)
        sketch.box(arrival, 4.6, "ABCD"[request], "droidspeak", width=2.0)
        sketch.box(arrival, 5.6, "", "full reuse", width=1.5, height=0.6)
    for y, text in ((1.0, "arrive"), (2.1, "engine"), (4.0, "arrive"), (5.1, "engine"), (5.9, "link")):
        sketch.text(0.2, y, text)
    for x, look, text in (
        (3.2, "recompute", "all layers"),
        (7.2, "droidspeak", "a group of layers"),
        (12.6, "full reuse", "the other layers' cache"),
    ):
        sketch.box(x, 6.6, look=look, width=0.6, height=0.6)
        sketch.text(x + 0.8, 6.9, text)
    return sketch


def under_load(recorded: Result | None, now: Result) -> Figure:
    """Figure 15: means over requests by rate, a line a way; bands are 95 % over seeds; dotted, the objective."""
    results = over(recorded, now)
    ran = [row for shown in reversed(results) for row in rows_where(shown.result.rows, what="run")]
    ways = {(row["method"], row["layers"]): row for row in ran}
    depth = max(layers for _, layers in ways)
    groups = sorted(layers for _, layers in ways if 0 < layers < depth)
    fig, axes = panels(1, 3, figsize=(9, 4.6))
    for ax, (metric, label) in zip(axes, SEEN.items(), strict=True):
        for shown in results:
            for method, layers in ways:
                if shown.library is not None and method == FULL:
                    continue  # the changed rule leaves it as it is; its decode steps were timed again
                if rows := rows_where(shown.result.rows, what="run", method=method, layers=layers):
                    _line(ax, rows, metric, DASHES[groups.index(layers)] if layers in groups else "-", shown)
        if metric in OBJECTIVES:
            objective = results[0].result.summary.value("objective_ms", metric=metric, objective=KNEE) / 1e3
            ax.axhline(objective, color=COLOURS["target"], linestyle=":", linewidth=2)
        ax.set(xscale="log", yscale="log", xlabel="requests a second", ylabel=label)
        for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            ticks(axis, [tick for tick in TICKS if low <= tick <= high])
    for (_, layers), row in sorted(ways.items(), key=lambda way: -way[0][1]):
        look, style = METHODS[row["method"]], DASHES[groups.index(layers)] if layers in groups else "-"
        named = f"{look.label}, {layers} of {depth} layers" if layers in groups else look.label
        axes[0].plot([], [], look.marker, linestyle=style, color=look.colour, label=named)
    objective_text = "objective: twice full prefill alone (record)"
    axes[0].plot([], [], ":", color=COLOURS["target"], linewidth=2, label=objective_text)
    legend(fig, axes[0], results, "capacity_x", columns=2)
    within = {"metric": "ttft", "objective": KNEE, "than": FULL}
    gain = results[0].result.summary.get("capacity_x", method=PARTIAL, across="mean", **within)
    record_text = f"; the record has {gain['value']:.1f}" if gain else ""
    fig.suptitle(f"At one TTFT the paper serves {PAPER} times as many requests{record_text}", fontsize=12)
    return fig


def _line(ax: Axes, rows: Rows, metric: str, dashes: str, shown: DrawnResult) -> None:
    look = METHODS[rows[0]["method"]]
    points = []
    for qps in sorted({row["qps"] for row in rows}):
        means = bootstrap([row[f"{metric}_mean_ms"] / 1e3 for row in rows_where(rows, qps=qps)])
        points.append((qps, means.low, means.estimate, means.high))
    if shown.repeats(ax, f"{rows[0]['method']} {rows[0]['layers']}", tuple(points)):
        return
    rates, low, middle, high = zip(*points, strict=True)
    ax.plot(rates, middle, look.marker, linestyle=dashes, color=look.colour, markersize=5, **shown.outlined)
    ax.fill_between(rates, low, high, color=look.colour, alpha=0.2 * shown.style["alpha"], linewidth=0)


def throughput_rows(result: Result) -> Table:
    """Return by way the most requests a second within each objective, over full prefill's."""
    depth = max(row["layers"] for row in result.rows if row["what"] == "run")
    for entry in result.summary.all("capacity_x", metric="ttft", objective=KNEE):
        labels = entry["where"]
        layers_text = f"{labels['layers']} of {depth} layers" if labels.get("layers") else "mean of the pairs"
        line = {"way": f"{labels['method']}, {layers_text}" if labels["method"] == PARTIAL else labels["method"]}
        for metric, label in OBJECTIVES.items():
            for knee in (KNEE, *OTHER_KNEES):
                column = f"{label} within {knee:g} x alone" if knee == KNEE else f"{label}, {knee:g} x"
                gain = result.summary.get("capacity_x", **labels | {"metric": metric, "objective": knee})
                line[column] = interval(gain, 2)
        yield line | {"paper": PAPER if labels["method"] == PARTIAL else ""}
