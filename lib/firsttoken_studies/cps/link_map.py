"""Where the cross-point would lie with other links and models; no measurement, the arithmetic of ``LinkModel``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.assets.shapes import shape_config
from firsttoken.cps.costs.arithmetic import LinkModel
from firsttoken.cps.costs.crossing import Crossing, crossing
from firsttoken_studies.cps.styles import PATHS, POLICIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """[shapes, links]: where the cheaper way changes over ``LENGTHS``."""
    found = []
    for name in SHAPES:
        models = [LinkModel(shape_config(name), rate, coalesced) for rate in LINKS.values()]
        found.append(
            [crossing(LENGTHS, [m.swap_s(n) for n in LENGTHS], [m.recompute_s(n) for n in LENGTHS]) for m in models]
        )
    return found


def link_map() -> Figure:
    """Up to which length to swap, by link and model: a copy per block, layer, K and V, and one copy."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("ways", [POLICIES["recompute"][1], "white", POLICIES["swap"][1]])
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True)
    for ax, (coalesced, path) in zip(axes, ((False, "per_block"), (True, "coalesced")), strict=True):
        found = map_of(coalesced)
        shares = np.array([[_swapped(each) for each in line] for line in found])
        ax.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            dark = abs(share - 0.5) > 0.3
            ax.text(
                column,
                row,
                _told(found[row][column]),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else "black",
            )
        ax.set_title(PATHS[path][0])
        ax.set_xticks(range(len(LINKS)), [f"{name}\n{rate / 1e9:g}" for name, rate in LINKS.items()])
        ax.set_xlabel("PCIe, and its GB/s in practice")
        ax.grid(visible=False)
    axes[0].set_yticks(range(len(SHAPES)), list(SHAPES.values()))
    fig.suptitle("Which length to swap up to depends on the model more than on the link (computed)")
    return fig


def _swapped(found: Crossing) -> float:
    """The share of the lengths, on a log scale, for which swap is cheaper."""
    low, high = np.log([LENGTHS[0], LENGTHS[-1]])
    below = 1.0 if found.tokens is None else (np.log(found.tokens) - low) / (high - low)
    return float(below if found.below == "swap" else 1 - below)


def _told(found: Crossing) -> str:
    if found.tokens is None:
        return found.below
    return f"swap\n{'to' if found.below == 'swap' else 'from'} {found.tokens:,.0f}"
