"""The figures of notebook 21: the published table, this machine beside it, and links that nobody measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from firsttoken.assets.shapes import shape_config
from firsttoken.cps.crossing import Crossing, crossing
from firsttoken.engine.kv import KVShape
from firsttoken.simulation.costs.published import PAPER_SHAPE, TABLE_2, PublishedCosts, decomposed
from firsttoken_studies.cps.assumed_costs import CopyCosts, LinkModel
from firsttoken_studies.cps.styles import LINES, PATH_LOOKS, POLICIES
from firsttoken_studies.nb21_swap_or_recompute.study import LONG, PCIE_4_X16, swap_ms
from firsttoken_studies.record.overlay import DrawnResult, name_results, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, panels, ticks
from firsttoken_studies.record.results import Result
from firsttoken_studies.record.schematic import Schematic


def schematic() -> Schematic:
    """Draw a swap as many small copies, and as one."""
    alt = (
        "The cache of a request lies in blocks anywhere on the GPU. Block by block, a swap makes a small copy for each "
        "block, each layer, and keys and values, and each copy has its price. Gathered first, it makes one copy."
    )
    sketch = Schematic(22, 8.6, alt)
    for y, heading, end in (
        (0.5, "Block by block: 48 copies a block in 24 layers, and each has its price", "host memory, piece by piece"),
        (4.7, "Gathered first: one copy of the same bytes", "host memory, all at once"),
    ):
        sketch.text(0.2, y, heading, heading=True)
        sketch.text(0.2, y + 1.4, "GPU")
        for block in range(9):
            taken = block in (0, 2, 3, 5, 8)
            sketch.box(2.2 + block, y + 0.9, "B" if taken else "", "online" if taken else "other", missing=not taken)
            if taken and y < 2:
                sketch.arrow((2.7 + block, y + 2), (2.7 + block, y + 2.9), look="swap")
        if y > 2:
            sketch.box(2.2, y + 2, "gather", "coalesced", width=9, height=0.8)
            sketch.arrow((6.7, y + 2.8), (6.7, y + 3.6), look="coalesced")
        sketch.text(12, y + 2.5, end)
    return sketch


def latency_by_length(recorded: Result | None, now: Result) -> Figure:
    """Figure 1 of the paper beside this machine's: milliseconds to recover a request of so many tokens."""
    results = over(recorded, now)
    fig, (paper, own_panel) = panels(1, 2, figsize=(9, 4.9))
    lengths = [row.tokens for row in TABLE_2]
    swap, again = [row.swap_ms for row in TABLE_2], [row.recompute_ms for row in TABLE_2]
    _, colour, marker = POLICIES["recompute"]
    _, published, square = PATH_LOOKS["per_block"]
    paper.plot(lengths, swap, square + "-", color=published, label="swap, as published")
    paper.plot(lengths, again, marker + "-", color=colour, label="recompute, as published")
    shape, parts = PAPER_SHAPE, decomposed(LONG, PCIE_4_X16)
    costs = CopyCosts(PublishedCosts(0.0), shape, parts.out_us_per_copy / 1e6, PCIE_4_X16, True)
    swap_ms = [costs.swap_s(tokens) * 1e3 for tokens in lengths]
    label, light, _ = PATH_LOOKS["coalesced"]
    paper.plot(lengths, swap_ms, "--", color=light, label=f"swap, {label} at 25 GB/s (computed)")
    crossing_tokens = crossing(lengths, swap, again).tokens
    paper.axvline(
        crossing_tokens,
        color=COLOURS["paper"],
        linestyle=":",
        label=f"its own data cross at {crossing_tokens:.0f} tokens",
    )
    paper.set_title("CPS Table 2: RTX A6000, Qwen2.5-0.5B")
    for shown in results:
        for name, label in _paths(shown).items():
            _line(own_panel, shown, "swap", f"swap, {label}", LINES[name], path=name)
        if shown.library is not None:
            if (share := _copies(shown)) != 1:
                scaled = [_scaled_swap_ms(row, PAPER_SHAPE, share) for row in TABLE_2]
                label = f"swap in {share:.3g} times the copies, your cell (computed)"
                paper.plot(lengths, scaled, f"{square}--", color=published, label=label, **shown.style)
            continue
        _line(own_panel, shown, "recompute", "recompute", "recompute")
        floors = sorted((int(name.split("_")[1]), floor["value"]) for name, floor in shown.result.floors.items())
        plain = "floor: plain copies out and in" if shown.own else None
        lengths_copied, copied_ms = [tokens for tokens, _ in floors], [ms for _, ms in floors]
        own_panel.plot(lengths_copied, copied_ms, ":", color=COLOURS["floor"], label=plain, **shown.style)
    own_panel.set_title(
        f"{now.machine.get('gpu') or 'this machine'}: {now.parameters['recovery']['model'] or now.parameters['model']}"
    )
    for ax in (paper, own_panel):
        ax.set(xscale="log", yscale="log", xlabel="tokens of the preempted request", ylabel="recovery, ms")
        ax.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    ticks(paper.xaxis, lengths, "{:,}")
    lengths_measured = sorted(
        {row["tokens"] for shown in results for row in shown.result.rows if row["what"] == "recompute"}
    )
    ticks(own_panel.xaxis, lengths_measured, "{:,}", fontsize=9)
    fig.suptitle("Swap loses its lead by 3,072 copies for 1,024 tokens; in one copy it wins at every length")
    name_results(fig, results)
    return fig


def block_sizes(recorded: Result | None, now: Result) -> Figure:
    """Draw the effect of larger blocks on the paper's cross-point (computed from its data), and on a swap on this
    machine."""
    results = over(recorded, now)
    fig, (paper, own_panel) = panels(1, 2, figsize=(9, 4.2))
    sizes = (8, 16, 32, 64, 128)
    lengths = [row.tokens for row in TABLE_2]
    again = [row.recompute_ms for row in TABLE_2]
    paper.axhline(1.0, color=POLICIES["recompute"][1])
    paper.text(lengths[-1], 1.03, "recompute", color=POLICIES["recompute"][1], ha="right", va="bottom")
    for size in sizes:
        shape = replace(PAPER_SHAPE, block_tokens=size)
        ratio = [_scaled_swap_ms(row, shape) / once for row, once in zip(TABLE_2, again, strict=True)]
        paper.plot(lengths, ratio, marker="o", color=PATH_LOOKS["per_block"][1], alpha=1 if size == 16 else 0.5)
        paper.annotate(f"{size}", (lengths[-1], ratio[-1]), (7, -3), textcoords="offset points", fontsize=9)
    paper.set(xscale="log", yscale="log", xlabel="tokens of the preempted request", ylabel="swap / recompute")
    ticks(paper.xaxis, lengths, "{:,}")
    ticks(paper.yaxis, (0.2, 0.5, 1, 2))
    paper.set_title("Table 2 with blocks of 8 to 128 tokens (computed)", fontsize=11)
    for shown in results:
        swept = shown.result.frame(what="swept")
        medians = swap_ms(swept).groupby([swept.path, swept.block_tokens]).median()
        if shown.library is not None and (share := _copies(shown)) != 1:
            ratio = [_scaled_swap_ms(row, PAPER_SHAPE, share) / row.recompute_ms for row in TABLE_2]
            paper.plot(lengths, ratio, marker="o", color=PATH_LOOKS["per_block"][1], **shown.style)
        for name, label in _paths(shown).items():
            sizes_measured = medians[name].index
            times = [{"value": ms / medians[name, max(sizes_measured)]} for ms in medians[name]]
            shown.line(own_panel, sizes_measured, times, LINES[name], label=label if shown.own else None)
    own_panel.set(xscale="log", xlabel="tokens in a block", ylabel="time of a swap / that with the largest blocks")
    own_panel.set_ylim(0, None)
    ticks(own_panel.xaxis, sizes_measured)
    own_panel.set_title("this machine, measured", fontsize=11)
    own_panel.legend(fontsize=9)
    fig.suptitle("Larger blocks mean fewer copies: from 32 tokens a block, swap wins at every length")
    name_results(fig, results)
    return fig


def _paths(shown: DrawnResult) -> dict[str, str]:
    """Return the swap paths of a result with their labels: of a changed cut, those that make other copies with it."""
    if shown.library is None:
        return {name: label for name, (label, *_) in PATH_LOOKS.items()}
    return {"per_block": "your cell's copies"} if _copies(shown) != 1 else {}


def _copies(shown: DrawnResult) -> float:
    """Return how many times as many copies a changed cut makes as the library's."""
    changed, library = (result.frame(what="swap", path="per_block") for result in (shown.result, shown.library))
    return float(changed.copies.sum() / library.copies.sum())


def _line(ax: Axes, shown: DrawnResult, measure: str, label: str, look: str, path: str | None = None) -> None:
    rows = shown.result.frame(what=measure, **({"path": path} if path else {}))
    rows["taken_ms"] = swap_ms(rows) if path else rows.ms
    quantiles = rows.groupby("tokens").taken_ms.quantile([0.025, 0.5, 0.975]).unstack()
    entries = quantiles.set_axis(["low", "value", "high"], axis=1).to_dict("records")
    shown.line(ax, quantiles.index, entries, look, label=label if shown.own else None)


def _scaled_swap_ms(row: object, shape: KVShape, share: float = 1.0) -> float:
    """A published swap with the copies of another block size, or this ``share`` of them: the bytes stay, each copy
    keeps its own price."""
    parts = decomposed(row.tokens, PCIE_4_X16)
    per_copy_ms = (parts.out_us_per_copy + parts.in_us_per_copy) / 1e3
    return share * shape.copies(row.tokens) * per_copy_ms + 2 * parts.wire_s * 1e3 + row.prep_ms


LINKS = {"3.0 x4": 3e9, "3.0 x16": 12.5e9, "4.0 x16": 25e9, "5.0 x16": 50e9, "6.0 x16": 100e9}  # bytes/s in practice
SHAPES = {
    "smollm2-135m": "SmolLM2 135M",
    "qwen2.5-0.5b": "Qwen2.5 0.5B (the paper)",
    "tinyllama-1.1b": "TinyLlama 1.1B",
    "llama-3.1-8b": "Llama 3.1 8B",
    "llama-2-7b": "Llama 2 7B (no GQA)",
}
LENGTHS = tuple(round(128 * 2 ** (step / 8)) for step in range(49))  # tokens, 128 to 8,192


def map_of(coalesced: bool) -> list[list[Crossing]]:
    """[shapes, links]: where the cheaper way changes over ``LENGTHS``, by the arithmetic of ``LinkModel`` alone."""
    lines = []
    for name in SHAPES:
        models = [LinkModel(shape_config(name), rate, coalesced) for rate in LINKS.values()]
        lines.append(
            [crossing(LENGTHS, [m.swap_s(n) for n in LENGTHS], [m.recompute_s(n) for n in LENGTHS]) for m in models]
        )
    return lines


def link_map() -> Figure:
    """Up to which length to swap, by link and model: a copy per block, layer, K and V, and one copy."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("ways", [POLICIES["recompute"][1], "white", POLICIES["swap"][1]])
    fig, axes = panels(1, 2, figsize=(9, 3.9), sharey=True)
    for ax, (coalesced, path) in zip(axes, ((False, "per_block"), (True, "coalesced")), strict=True):
        crossings = map_of(coalesced)
        shares = np.array([[_swapped(crossing_point) for crossing_point in line] for line in crossings])
        ax.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            dark = abs(share - 0.5) > 0.3
            within = {"ha": "center", "va": "center", "fontsize": 9, "color": "white" if dark else "black"}
            ax.text(column, row, _told(crossings[row][column]), **within)
        ax.set_title(PATH_LOOKS[path][0])
        ax.set_xticks(range(len(LINKS)), [f"{name}\n{rate / 1e9:g}" for name, rate in LINKS.items()])
        ax.set_xlabel("PCIe, and its GB/s in practice")
        ax.grid(visible=False)
    axes[0].set_yticks(range(len(SHAPES)), list(SHAPES.values()))
    fig.suptitle("Which length to swap up to depends on the model more than on the link (computed)")
    return fig


def _swapped(crossing_point: Crossing) -> float:
    """The share of the lengths, on a log scale, for which swap is cheaper."""
    low, high = np.log([LENGTHS[0], LENGTHS[-1]])
    below = 1.0 if crossing_point.tokens is None else (np.log(crossing_point.tokens) - low) / (high - low)
    return float(below if crossing_point.below == "swap" else 1 - below)


def _told(crossing_point: Crossing) -> str:
    if crossing_point.tokens is None:
        return crossing_point.below
    return f"swap\n{'to' if crossing_point.below == 'swap' else 'from'} {crossing_point.tokens:,.0f}"
