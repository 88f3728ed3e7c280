"""The ceilings of a machine as tables and a figure, and the floors that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firsttoken_studies.record.plot import COLOURS
from firsttoken_studies.record.results import Result
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "memcpy": "memory copy",
    "disk_read_cold": "disk read, cold",
    "disk_read_warm": "disk read, page cache",
    "h2d_pinned": "host to GPU, pinned",
    "d2h_pinned": "GPU to host, pinned",
    "device_memcpy": "GPU memory copy",
    "matmul_fp32": "matrix product, fp32",
    "matmul_bf16": "matrix product, bf16",
}
UNITS = {"GB_per_s": "GB/s", "GFLOP_per_s": "GFLOP/s"}


def rate_rows(result: Result) -> list[dict[str, Any]]:
    """One row a rate: median with its 95 % interval, unit, repeats and how it was measured."""
    how = {row["what"]: row["how"] for row in result.rows}
    return [
        {
            "rate": title,
            "median [95 %]": interval(entry),
            "unit": UNITS[entry["unit"]],
            "n": entry["n"],
            "how": how[rate],
        }
        for rate, title in TITLES.items()
        if (entry := result.summary.get(rate))
    ]


def rates(result: Result) -> Figure:
    """Every repeat of every rate as a dot, bytes and operations apart, medians as bars."""
    import matplotlib.pyplot as plt

    unit_of = {entry["measure"]: entry["unit"] for entry in result.summary}
    groups = [[rate for rate in TITLES if unit_of.get(rate) == unit] for unit in UNITS]
    fig, axes = plt.subplots(
        2, 1, figsize=(8, 1.6 + 0.55 * len(result.summary)), height_ratios=[len(g) for g in groups]
    )
    for ax, group, unit in zip(axes, groups, UNITS.values(), strict=True):
        for row_index, rate in enumerate(group):
            values = [row["value"] for row in result.rows if row["what"] == rate]
            ax.scatter(values, [row_index] * len(values), color=COLOURS["measured"], alpha=0.6, zorder=3)
            ax.barh(row_index, result.summary.value(rate), height=0.5, color=COLOURS["measured"], alpha=0.25)
        ax.set(xlabel=unit, yticks=range(len(group)), yticklabels=[TITLES[w] for w in group], xlim=(0, None))
        ax.invert_yaxis()
    return fig


def floor_rows(result: Result, parameters: Mapping[str, float], prompt_tokens: int) -> list[dict[str, Any]]:
    """Floors in seconds for models of so many ``parameters`` in 16 bits: reading the weights, multiplying a prompt.

    2 bytes a parameter to read, 2 operations a parameter and prompt token to compute; attention is left out.
    """
    rate = {entry["measure"]: entry["value"] * 1e9 for entry in result.summary}
    return [
        {
            "model": name,
            "GB in 16 bits": f"{2 * count / 1e9:.2f}",
            "read, disk cold, s": f"{2 * count / rate['disk_read_cold']:.2f}",
            "read, page cache, s": f"{2 * count / rate['disk_read_warm']:.2f}",
            f"prefill of {prompt_tokens}, fp32, s": f"{2 * count * prompt_tokens / rate['matmul_fp32']:.2f}",
            f"prefill of {prompt_tokens}, bf16, s": f"{2 * count * prompt_tokens / rate['matmul_bf16']:.2f}",
        }
        for name, count in parameters.items()
    ]
