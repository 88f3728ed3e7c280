"""The figure and the table of notebook 42."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken_studies.nb42_the_simulator_and_a_gpu.simulator_error import METRICS, QUANTILES, VLLM
from firsttoken_studies.nb42_the_simulator_and_a_gpu.simulator_error import SIMULATED as FORETOLD
from firsttoken_studies.record.plot import COLOURS, LOOKS, panels
from firsttoken_studies.record.results import Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def errors(result: Result) -> Figure:
    """Draw each request of vLLM's run beside the simulated one: on the diagonal they agree."""
    titles = {"ttft": ("TTFT", "s", 1.0), "tpot": ("TPOT", "ms", 1e3), "latency": ("latency", "s", 1.0)}
    fig, axes = panels(1, 3, figsize=(12, 4.2))
    for ax, metric in zip(axes, METRICS, strict=True):
        name, unit, scale = titles[metric]
        real, simulated = (scale * result.frame(run=run)[f"{metric}_s"] for run in (VLLM, FORETOLD))
        ax.plot(real, simulated, LOOKS["measured"].marker, color=COLOURS["measured"], markersize=3, alpha=0.6)
        limits = [0, 1.05 * max(real.max(), simulated.max())]
        ax.plot(limits, limits, color=COLOURS["floor"], linewidth=1, linestyle=":")
        ax.set(xlabel=f"vLLM's {name}, {unit}", ylabel=f"simulated, {unit}", title=f"{name}, n = {len(real)}")
    return fig


def error_rows(result: Result) -> Table:
    """Return by how much mean, median and P99 are off."""
    names = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
    for metric, told_as in names.items():
        line = {"metric": told_as}
        for name in QUANTILES:
            off = result.summary.value(f"{metric}_{name}_off_pct", source=FORETOLD, than=VLLM)
            line[f"{name} off, %"] = f"{off:+.1f}"
        yield line
