"""The figures of notebook 21, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.crosspoint.costs.copies import CopyCosts
from firsttoken.crosspoint.costs.crossing import crossing
from firsttoken.crosspoint.experiments.recovery_latency import LONG, PCIE_4_X16, swap_ms
from firsttoken.crosspoint.experiments.styles import PATHS, POLICIES
from firsttoken.engine.costs.published import PAPER_SHAPE, TABLE_2, PublishedCosts, decomposed
from firsttoken.engine.kv import KVShape
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def latency_by_length(result: Result) -> Figure:
    """Figure 1 of the paper beside this machine's: milliseconds to recover a request of so many tokens."""
    import matplotlib.pyplot as plt

    fig, (paper, here) = plt.subplots(1, 2, figsize=(10.5, 4.2))
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
    paper.axvline(at, ymax=0.62, color=COLOURS["paper"], linestyle=":", label=f"its own data cross at {at:.0f} tokens")
    paper.set_title("CPS Table 2: RTX A6000, Qwen2.5-0.5B")
    for name, (label, path_colour, path_marker) in PATHS.items():
        _line(here, result, "swap", f"swap, {label}", path_colour, path_marker, path=name)
    _line(here, result, "recompute", "recompute", colour, marker)
    floors = sorted((int(name.split("_")[1]), floor["value"]) for name, floor in result.floors.items())
    here.plot(*zip(*floors, strict=True), ":", color=COLOURS["none"], label="plain copies out and in")
    here.set_title(f"{result.slug}: {result.parameters['recovery']['model'] or result.parameters['model']}")
    for ax in (paper, here):
        ax.set(xscale="log", yscale="log", xlabel="tokens of the preempted request", ylabel="recovery, ms")
        ax.set_xticks([row for row in (64, 128, 256, 512, 1024, 2048, 4096, 8192)])
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.xaxis.set_minor_formatter("")
        ax.legend(fontsize=8.5, loc="upper left")
    paper.set_xlim(400, 10500)
    paper.set_ylim(0.5, 900)
    lowest, highest = here.get_ylim()
    here.set_ylim(lowest, highest * 40)
    tokens = sorted({row["tokens"] for row in result.rows if row["what"] == "recompute"})
    here.set_xlim(tokens[0] / 1.3, tokens[-1] * 1.3)
    return fig


def block_sizes(result: Result) -> Figure:
    """What larger blocks do: to the paper's cross-point (computed from its data), and to a swap on this machine."""
    import matplotlib.pyplot as plt

    fig, (paper, here) = plt.subplots(1, 2, figsize=(10.5, 3.8))
    sizes = [8, 16, 32, 64, 128]
    lengths = [row.tokens for row in TABLE_2]
    again = [row.recompute_ms for row in TABLE_2]
    paper.plot(lengths, [1.0] * len(lengths), color=POLICIES["recompute"][1], label="recompute")
    for size, style in zip(sizes, ("-", "--", "-.", ":", (0, (1, 4))), strict=True):
        shape = KVShape(PAPER_SHAPE.layers, PAPER_SHAPE.kv_heads, PAPER_SHAPE.head_dim, PAPER_SHAPE.dtype, size)
        swap = [_scaled_swap_ms(row, shape) for row in TABLE_2]
        over = [s / r for s, r in zip(swap, again, strict=True)]
        paper.plot(
            lengths, over, linestyle=style, marker="o", color=PATHS["per_block"][1], label=f"swap, blocks of {size}"
        )
    paper.set(xscale="log", yscale="log", xlabel="tokens of the preempted request", ylabel="swap / recompute")
    paper.set_xticks(lengths, [str(length) for length in lengths])
    paper.xaxis.set_minor_formatter("")
    paper.set_yticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])
    paper.yaxis.set_minor_formatter("")
    paper.set_title("the paper's data, fewer and larger copies (computed)")
    swept = [row for row in result.rows if row["what"] == "swept"]
    there = sorted({row["block_tokens"] for row in swept})
    for name, (label, colour, marker) in PATHS.items():
        times = [_median_of(swept, name, size) for size in there]
        here.plot(there, times, marker + "-", color=colour, label=f"swap, {label}")
    tokens = swept[0]["tokens"]
    here.set(xscale="log", xlabel="tokens in a block", ylabel=f"swap of {tokens} tokens, ms", ylim=(0, None))
    here.set_xticks(there, [str(size) for size in there])
    here.xaxis.set_minor_formatter("")
    here.set_title(f"{result.slug}, measured")
    paper.legend(fontsize=8.5, ncols=2, loc="upper left", handlelength=3.5)
    paper.set_ylim(0.13, 14)
    here.legend(fontsize=8.5)
    return fig


def _line(ax: Axes, result: Result, what: str, label: str, colour: str, marker: str, path: str | None = None) -> None:
    rows = [row for row in result.rows if row["what"] == what and row.get("path") == path]
    tokens = sorted({row["tokens"] for row in rows})
    times = [[row["ms"] if what == "recompute" else swap_ms(row) for row in rows if row["tokens"] == t] for t in tokens]
    low, middle, high = np.array([np.percentile(group, [2.5, 50, 97.5]) for group in times]).T
    ax.plot(tokens, middle, marker + "-", color=colour, label=label)
    ax.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)


def _swap_ms(lengths: list[int], costs: CopyCosts) -> list[float]:
    return [costs.swap_s(tokens) * 1e3 for tokens in lengths]


def _scaled_swap_ms(row: object, shape: KVShape) -> float:
    """A published swap with the copies of another block size: the bytes stay, each copy keeps its own price."""
    parts = decomposed(row.tokens, PCIE_4_X16)
    per_copy_ms = (parts.out_us_per_copy + parts.in_us_per_copy) / 1e3
    return shape.copies(row.tokens) * per_copy_ms + 2 * parts.wire_s * 1e3 + row.prep_ms


def _median_of(rows: list, path: str, size: int) -> float:
    return float(np.median([swap_ms(row) for row in rows if row["path"] == path and row["block_tokens"] == size]))
