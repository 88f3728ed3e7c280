"""The figure and the tables of notebook 51, drawn from a result alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.swarm.experiments.eight_bits import PLAIN, WHOLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = {
    "states": "states, between three servers",
    "states_every_layer": "states, after every layer",
    "weights_inputs_kept": "weights, inputs as they are",
    "weights": "weights and inputs, outliers apart",
    "weights_outliers_among_the_rest": "weights and inputs, with outliers",
    "weights_inputs_kept_and_states": "weights, states between servers",
    "both": "weights, inputs, and states",
}
STEP_NAMES = {"16_bits": "16 bits", "8_bits": "8 bits, inputs too", "8_bits_inputs_kept": "8 bits, inputs as they are"}


def quality(result: Result) -> Figure:
    """Perplexity lost by what is in 8 bits, with intervals over windows, and the goal."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(9, 3.4))
    for place, variant in enumerate(VARIANTS):
        entry = result.summary.of("perplexity_lost_pct", variant=variant, than=PLAIN)
        ax.plot([entry["low"], entry["high"]], [place, place], color=COLOURS["measured"], linewidth=2)
        ax.plot(entry["value"], place, LOOKS["measured"].marker, color=COLOURS["measured"], markersize=8)
    ax.axvline(0, color=COLOURS["floor"], linewidth=1)
    ax.axvline(1, color=COLOURS["target"], linestyle="--", linewidth=1.5)
    ax.annotate("goal: below 1 %", (1, -0.45), (5, 0), textcoords="offset points", fontsize=9, va="center")
    ax.set_yticks(range(len(VARIANTS)), list(VARIANTS.values()))
    ax.set(ylim=(len(VARIANTS) - 0.5, -0.8), xlabel=f"perplexity lost, %; {entry['n']} windows, paired")
    return fig


def quality_rows(result: Result) -> Rows:
    """Perplexity lost and how often the likeliest token stays, by what is in 8 bits."""
    return [
        {
            "in 8 bits": name,
            "perplexity lost, %": interval(result.summary.of("perplexity_lost_pct", variant=variant, than=PLAIN), 2),
            "same likeliest token, %": interval(result.summary.of("same_token_pct", variant=variant, than=PLAIN), 1),
        }
        for variant, name in VARIANTS.items()
    ]


def speed_rows(result: Result) -> Rows:
    """Tokens a second of all layers in 16 bits and by both products of 8, how much slower these are, by requests."""
    paper = {1: "5", 8: "negligible", 32: "negligible"}
    summary, rows = result.summary, []
    for batch in result.parameters["eight_bits"]["batches"]:
        for name, label in STEP_NAMES.items():
            rows.append(
                {
                    "requests": batch,
                    "weights": label,
                    "tokens/s": interval(summary.of("tokens_per_s", variant=name, batch=batch), 1),
                    "slower here, %": interval(summary.get("slower_pct", variant=name, batch=batch, than=WHOLE), 1),
                    "slower in the paper, %": paper.get(batch, "") if name == "8_bits" else "",
                }
            )
    return rows


def byte_rows(result: Result) -> Rows:
    """Bytes in 8 bits over those in 16, and the share of outliers, beside the paper's."""
    said = {"weights": ("weights", "about half"), "states": ("hidden states on the wire", "half")}
    rows = [
        {
            "what": f"{what}, of their 16-bit bytes",
            "paper": paper,
            "measured": result.summary.value("bytes_x", variant=variant, than=WHOLE),
        }
        for variant, (what, paper) in said.items()
    ]
    return [*rows, {"what": "outliers, %", "paper": "0.1", "measured": result.summary.value("outliers_pct")}]
