"""The figure and the table of notebook 42."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken_studies.nb42_the_simulator_and_a_gpu.simulator_error import METRICS, QUANTILES, VLLM
from firsttoken_studies.nb42_the_simulator_and_a_gpu.simulator_error import SIMULATED as FORETOLD
from firsttoken_studies.record.plot import COLOURS, LOOKS, panels
from firsttoken_studies.record.results import Result, Table
from firsttoken_studies.record.schematic import Schematic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def schematic() -> Schematic:
    """Draw that the same requests go to a real GPU and to the simulator."""
    alt = (
        "The same requests go two ways. On the GPU, vLLM serves them, and its clock says when each token came. In the "
        "simulator the same kind of scheduler fills its steps, a table of measured operators says how long each step "
        "takes, and no model computes. The times of both are laid side by side."
    )
    sketch = Schematic(22, 5.6, alt)
    sketch.text(0.2, 0.4, "The same requests, served by a GPU and by a table of its operators", heading=True)
    sketch.box(0.3, 2.3, "300 requests", "other", width=4, height=1.2)
    for y, engine, source, look in (
        (1.2, "vLLM", "the GPU computes", "measured"),
        (3.6, "scheduler", "a table says how long", "ours"),
    ):
        sketch.arrow((4.4, 2.9), (5.9, y + 0.6))
        sketch.box(6, y, engine, look, width=3.6, height=1.2)
        sketch.box(9.8, y, source, look, width=6, height=1.2)
        sketch.arrow((15.9, y + 0.6), (17.4, 2.9))
    sketch.box(17.5, 2.3, "how far apart?", "target", width=4.2, height=1.2, missing=True)
    return sketch


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
