"""The figure and the table of the engine beside other systems: the reader's run over the record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firsttoken.study.overlay import name_results, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOALS = {"generate": 1.1, "continuous_batching": 1.4, "vllm": 0.9}  # this project's, of the engine over each
SYSTEMS: dict[str, str] = {
    "generate": "generate, one padded batch",
    "generate_fused": "generate, fused model",
    "continuous_batching": "transformers' continuous batching",
    "vllm": "vLLM (CPU)",
    "engine_stock": "this engine, stock modules",
    "engine": "this engine",
}


def throughput_bars(recorded: Result | None, now: Result) -> Figure:
    """Tokens per second of every system, one panel a case, and what this project asks of its engine (``GOALS``)."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    cases = list({(row["dtype"], row["requests"]): None for drawn in results for row in drawn.result.rows})
    there = [name for name in SYSTEMS if any(row["system"] == name for drawn in results for row in drawn.result.rows)]
    fig, axes = plt.subplots(1, len(cases), figsize=(9, 0.45 * len(there) + 1.7), squeeze=False, sharey=True)
    for ax, (dtype, count) in zip(axes[0], cases, strict=True):
        for drawn in results:
            case = {"dtype": dtype, "requests": count}
            found = {name: drawn.result.summary.get("tokens_per_s", engine=name, **case) for name in there}
            for place, name in enumerate(there):
                if (entry := found[name]) is None:
                    continue
                look, at = "measured" if name.startswith("engine") else "other", place + drawn.shift
                height = 0.65 if drawn.alone else 0.32
                edge = {"edgecolor": "black", "linewidth": 1} if drawn.own else {"linewidth": 0}
                ax.barh(at, entry["value"], color=COLOURS[look], height=height, **edge, **drawn.style)
                ax.plot([entry["low"], entry["high"]], [at] * 2, color=COLOURS["mark"], linewidth=1.5, zorder=5)
            asked = [share * found[name]["value"] for name, share in GOALS.items() if found.get(name)]
            if asked and found.get("engine"):
                ends = [there.index("engine") + drawn.shift + side * 0.2 for side in (-1, 1)]
                ax.plot([max(asked)] * 2, ends, color=COLOURS["target"], linewidth=3, zorder=6)
        ax.set_title(f"{dtype}, {count} requests", fontsize=11)
        ax.set_xlabel("tokens/s")
        ax.set_yticks(range(len(there)), [SYSTEMS[name] for name in there])
        ax.grid(axis="y", visible=False)
    axes[0][0].invert_yaxis()
    axes[0][-1].plot([], [], color=COLOURS["target"], linewidth=3, label="goal")
    axes[0][-1].legend(loc="upper right")
    fig.suptitle("The engine is ahead of generate and of continuous batching, and behind vLLM")
    name_results(fig, results, "tokens_per_s")
    return fig


def throughput_rows(result: Result) -> Rows:
    """Tokens per second of every system, and both forms of this engine over it."""
    cases = {(row["dtype"], row["requests"]): None for row in result.rows}
    rows = []
    for name, label in SYSTEMS.items():
        line: dict[str, Any] = {}
        for dtype, count in cases:
            case = {"dtype": dtype, "requests": count}
            rate = result.summary.get("tokens_per_s", engine=name, **case)
            line[f"{dtype}, {count} requests: tokens/s"] = interval(rate, 0)
            for engine, ours in (("engine", "engine"), ("engine_stock", "engine, stock modules")):
                ratio = result.summary.get("tokens_per_s_x", engine=engine, than=name, **case)
                line[f"{ours} / it ({dtype}, {count})"] = interval(ratio, 2)
        if any(line.values()):
            rows.append({"system": label} | {key: value for key, value in line.items() if value or "tokens/s" in key})
    return rows
