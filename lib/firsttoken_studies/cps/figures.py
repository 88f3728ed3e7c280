"""The figures of notebook 21: the published table, and the reader's run over the record."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from firsttoken.cps.costs.copies import CopyCosts
from firsttoken.cps.costs.crossing import crossing
from firsttoken.engine.costs.published import PAPER_SHAPE, TABLE_2, PublishedCosts, decomposed
from firsttoken.engine.kv import KVShape
from firsttoken.study.overlay import Drawn, name_results, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result
from firsttoken_studies.cps.recovery_latency import LONG, PCIE_4_X16, swap_ms
from firsttoken_studies.cps.styles import LINES, PATHS, POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def latency_by_length(recorded: Result | None, now: Result) -> Figure:
    """Figure 1 of the paper beside this machine's: milliseconds to recover a request of so many tokens."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    fig, (paper, here) = plt.subplots(1, 2, figsize=(9, 4.9))
    lengths = [row.tokens for row in TABLE_2]
    swap, again = [row.swap_ms for row in TABLE_2], [row.recompute_ms for row in TABLE_2]
    _, colour, marker = POLICIES["recompute"]
    paper.plot(lengths, swap, PATHS["per_block"][2] + "-", color=PATHS["per_block"][1], label="swap, as published")
    paper.plot(lengths, again, marker + "-", color=colour, label="recompute, as published")
    shape, parts = PAPER_SHAPE, decomposed(LONG, PCIE_4_X16)
    whole = _swap_ms(lengths, CopyCosts(PublishedCosts(0.0), shape, parts.out_us_per_copy / 1e6, PCIE_4_X16, True))
    label, light, _ = PATHS["coalesced"]
    paper.plot(lengths, whole, "--", color=light, label=f"swap, {label} at 25 GB/s (computed)")
    at = crossing(lengths, swap, again).tokens
    paper.axvline(at, color=COLOURS["paper"], linestyle=":", label=f"its own data cross at {at:.0f} tokens")
    paper.set_title("CPS Table 2: RTX A6000, Qwen2.5-0.5B")
    for drawn in results:
        for name, (label, *_) in PATHS.items():
            _line(here, drawn, "swap", f"swap, {label}", LINES[name], path=name)
        _line(here, drawn, "recompute", "recompute", "recompute")
        floors = sorted((int(name.split("_")[1]), floor["value"]) for name, floor in drawn.result.floors.items())
        plain = "floor: plain copies out and in" if drawn.own else None
        here.plot(*zip(*floors, strict=True), ":", color=COLOURS["floor"], label=plain, **drawn.style)
    here.set_title(f"this machine: {now.parameters['recovery']['model'] or now.parameters['model']}")
    for ax in (paper, here):
        ax.set(xscale="log", yscale="log", xlabel="tokens of the preempted request", ylabel="recovery, ms")
        ax.xaxis.set_minor_formatter("")
        ax.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    paper.set_xticks(lengths, [f"{length:,}" for length in lengths])
    there = sorted({row["tokens"] for drawn in results for row in drawn.result.rows if row["what"] == "recompute"})
    here.set_xticks(there, [f"{length:,}" for length in there], fontsize=9)
    fig.suptitle("Swap loses its lead by 3,072 copies for 1,024 tokens; in one copy it wins at every length")
    name_results(fig, results)
    return fig


def block_sizes(recorded: Result | None, now: Result) -> Figure:
    """What larger blocks do: to the paper's cross-point (computed from its data), and to a swap on this machine."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    fig, (paper, here) = plt.subplots(1, 2, figsize=(9, 4.2))
    sizes = (8, 16, 32, 64, 128)
    lengths = [row.tokens for row in TABLE_2]
    again = [row.recompute_ms for row in TABLE_2]
    paper.axhline(1.0, color=POLICIES["recompute"][1])
    paper.text(lengths[-1], 1.03, "recompute", color=POLICIES["recompute"][1], ha="right", va="bottom")
    for size in sizes:
        shape = replace(PAPER_SHAPE, block_tokens=size)
        ratio = [_scaled_swap_ms(row, shape) / once for row, once in zip(TABLE_2, again, strict=True)]
        paper.plot(lengths, ratio, marker="o", color=PATHS["per_block"][1], alpha=1 if size == 16 else 0.5)
        paper.annotate(f"{size}", (lengths[-1], ratio[-1]), (7, -3), textcoords="offset points", fontsize=9)
    paper.set(xscale="log", yscale="log", xlabel="tokens of the preempted request", ylabel="swap / recompute")
    paper.set_xticks(lengths, [f"{length:,}" for length in lengths])
    paper.xaxis.set_minor_formatter("")
    paper.set_yticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])
    paper.yaxis.set_minor_formatter("")
    paper.set_title("Table 2 with blocks of 8 to 128 tokens (computed)", fontsize=11)
    for drawn in results:
        swept = [row for row in drawn.result.rows if row["what"] == "swept"]
        there = sorted({row["block_tokens"] for row in swept})
        for name, (label, *_) in PATHS.items():
            least = _median_of(swept, name, max(there))
            times = [{"value": _median_of(swept, name, size) / least} for size in there]
            drawn.line(here, there, times, LINES[name], label=label if drawn.own else None)
    here.set(xscale="log", xlabel="tokens in a block", ylabel="time of a swap / that with the largest blocks")
    here.set_ylim(0, None)
    here.set_xticks(there, [str(size) for size in there])
    here.xaxis.set_minor_formatter("")
    here.set_title("this machine, measured", fontsize=11)
    here.legend(fontsize=9)
    fig.suptitle("Larger blocks mean fewer copies: from 32 tokens a block, swap wins at every length")
    name_results(fig, results)
    return fig


def _line(ax: Axes, drawn: Drawn, what: str, label: str, look: str, path: str | None = None) -> None:
    rows = [row for row in drawn.result.rows if row["what"] == what and row.get("path") == path]
    tokens = sorted({row["tokens"] for row in rows})
    times = [[row["ms"] if what == "recompute" else swap_ms(row) for row in rows if row["tokens"] == t] for t in tokens]
    ends = [dict(zip(("low", "value", "high"), np.percentile(group, [2.5, 50, 97.5]), strict=True)) for group in times]
    drawn.line(ax, tokens, ends, look, label=label if drawn.own else None)


def _swap_ms(lengths: list[int], costs: CopyCosts) -> list[float]:
    return [costs.swap_s(tokens) * 1e3 for tokens in lengths]


def _scaled_swap_ms(row: object, shape: KVShape) -> float:
    """A published swap with the copies of another block size: the bytes stay, each copy keeps its own price."""
    parts = decomposed(row.tokens, PCIE_4_X16)
    per_copy_ms = (parts.out_us_per_copy + parts.in_us_per_copy) / 1e3
    return shape.copies(row.tokens) * per_copy_ms + 2 * parts.wire_s * 1e3 + row.prep_ms


def _median_of(rows: list, path: str, size: int) -> float:
    return float(np.median([swap_ms(row) for row in rows if row["path"] == path and row["block_tokens"] == size]))
