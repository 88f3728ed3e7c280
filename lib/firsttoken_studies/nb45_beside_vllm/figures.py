"""The figure and the table of notebook 45: `firsttoken serve` beside vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.summary import Scalar, Summary
from firsttoken_studies.nb45_beside_vllm.study import BEST, OURS, VLLM
from firsttoken_studies.record.plot import LOOKS, panels
from firsttoken_studies.record.results import Result, Rows, frame_of
from firsttoken_studies.record.show import interval
from firsttoken_studies.sarathi.styles import scaled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SYSTEMS = {OURS: ("sarathi", "firsttoken serve"), VLLM: ("other", "vLLM")}
PANELS = (
    ("ttft_p50_s", 1.0, "median first token, s"),
    ("itl_p99_s", 1e3, "P99 of time between tokens, ms"),
    ("tokens_per_s", 1.0, "tokens/s"),
)
COLUMNS = {  # of the table: a measure, its ratio to vLLM's, digits, and from seconds to the unit
    "P50 TTFT, s": ("ttft_p50_s", "ttft_p50_x", 2, 1.0),
    "P99 TTFT, s": ("ttft_p99_s", "ttft_p99_x", 2, 1.0),
    "P99 ITL, ms": ("itl_p99_s", "itl_p99_x", 1, 1e3),
    "P99 of single gaps, ms": ("gap_p99_s", "gap_p99_x", 0, 1e3),
    "tokens/s": ("tokens_per_s", "tokens_per_s_x", 1, 1.0),
}


def beside(result: Result) -> Figure:
    """Draw the client's times, by tokens a step: rounds as small dots beside their median, a large mark."""
    budgets = result.parameters["live_peer"]["budgets"]
    fig, axes = panels(1, len(PANELS), figsize=(12, 3.9))
    for ax, (column, scale, label) in zip(axes, PANELS, strict=True):
        for shift, (system, (look, system_label)) in zip((-0.1, 0.1), SYSTEMS.items(), strict=True):
            colour, marker = LOOKS[look]
            for position, budget in enumerate(budgets):
                values = scale * frame_of(result.rows, system=system, budget=budget)[column]
                ax.plot([position + 2 * shift] * len(values), values, ".", color=colour, markersize=7)
            medians = [scale * result.summary.value(column, engine=system, budget_tokens=budget) for budget in budgets]
            places = [position + shift for position in range(len(budgets))]
            ax.plot(places, medians, marker, ls="-", color=colour, markersize=8, label=system_label)
        ax.set(xlabel="tokens a step, at most", ylabel=label, xlim=(-0.5, len(budgets) - 0.5))
        ax.set_xticks(range(len(budgets)), [f"{budget:,}" for budget in budgets])
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return fig


def peer_rows(result: Result) -> Rows:
    """Medians by tokens a step and server, and how often vLLM's ours are; in the last row with each at the budget that
    is best for it."""
    rows: Rows = []
    for budget in result.parameters["live_peer"]["budgets"]:
        for system, (_, label) in SYSTEMS.items():
            entries = {
                head: interval(scaled(result.summary.of(column, engine=system, budget_tokens=budget), scale), digits)
                for head, (column, _, digits, scale) in COLUMNS.items()
            }
            rows.append({"tokens a step": f"{budget:,}: {label}"} | entries)
        rows.append({"tokens a step": f"{budget:,}: over vLLM"} | _over(result.summary, budget_tokens=budget))
    return [*rows, {"tokens a step": "each at its best: over vLLM"} | _over(result.summary, **BEST)]


def _over(summary: Summary, **labels: Scalar) -> dict[str, str]:
    return {
        head: interval(summary.of(measure, engine=OURS, than=VLLM, **labels), 2)
        for head, (_, measure, _, _) in COLUMNS.items()
    }
