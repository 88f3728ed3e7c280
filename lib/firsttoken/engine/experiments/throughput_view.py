"""The figure and the table of the engine beside other systems, from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def throughput_bars(result: Result) -> Figure:
    """Tokens per second of every system, one panel a case, and what this project asks of its engine (``GOALS``)."""
    import matplotlib.pyplot as plt

    cases = list({(row["dtype"], row["requests"]): None for row in result.rows})
    fig, axes = plt.subplots(1, len(cases), figsize=(3.2 + 2.6 * len(cases), 3.6), squeeze=False, sharey=True)
    there = [name for name in SYSTEMS if any(row["system"] == name for row in result.rows)]
    for ax, (dtype, count) in zip(axes[0], cases, strict=True):
        for place, name in enumerate(there):
            entry = result.summary.get("tokens_per_s", engine=name, dtype=dtype, requests=count)
            if entry:
                ours = name.startswith("engine")
                ax.barh(place, entry["value"], color=COLOURS["measured"] if ours else COLOURS["other"], height=0.65)
                ax.plot([entry["low"], entry["high"]], [place] * 2, color=COLOURS["floor"], linewidth=1.5)
        asked = [
            share * result.summary.value("tokens_per_s", engine=name, dtype=dtype, requests=count)
            for name, share in GOALS.items()
            if name in there
        ]
        bottom = there.index("engine")
        ax.plot([max(asked)] * 2, [bottom - 0.45, bottom + 0.45], color=COLOURS["report"], linewidth=3)
        ax.set_title(f"{dtype}, {count} requests")
        ax.set_xlabel("tokens/s")
        ax.set_yticks(range(len(there)), [SYSTEMS[name] for name in there])
        ax.grid(axis="y", visible=False)
    axes[0][0].invert_yaxis()
    axes[0][0].plot([], [], color=COLOURS["report"], linewidth=3, label="goal: 1.1 generate, 1.4 batching, 0.9 vLLM")
    fig.legend(loc="outside lower right", fontsize=9)
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
