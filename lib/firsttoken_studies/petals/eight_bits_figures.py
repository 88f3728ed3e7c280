"""The figure and the tables of notebook 51, drawn from a result alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.overlay import name_results, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken_studies.petals.eight_bits import PLAIN, WHOLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = {
    "states": "hidden states, between three servers",
    "states_every_layer": "hidden states, after every layer",
    "weights_inputs_kept": "weights alone",
    "weights": "weights and inputs (LLM.int8)",
    "weights_outliers_among_the_rest": "weights and inputs, outliers in the integers",
    "weights_inputs_kept_and_states": "weights alone, states between servers",
    "both": "weights and inputs, states between servers",
}
STEP_NAMES = {"16_bits": "16 bits", "8_bits": "8 bits, inputs too", "8_bits_inputs_kept": "8 bits, inputs as they are"}
_PAPER = {"OPT-175B": (75.3, 74.9), "BLOOM-176B": (70.1, 70.3)}  # average accuracy of Table 1 in 16 and in 8 bits


def quality(recorded: Result | None, now: Result) -> Figure:
    """Perplexity lost by what is in 8 bits, with intervals over windows, and the goal."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(9, 4.2))
    results = over(recorded, now)
    for drawn in results:
        for place, variant in enumerate(VARIANTS):
            entry = drawn.result.summary.get("perplexity_lost_pct", variant=variant, than=PLAIN)
            drawn.point(ax, place + drawn.shift, entry, "measured", along="x")
    ax.axvline(0, color=COLOURS["floor"], linewidth=1)
    ax.axvline(1, color=COLOURS["target"], linestyle="--", linewidth=1.5)
    ax.annotate("goal: below 1 %", (1, -0.5), (5, 0), textcoords="offset points", fontsize=9, va="center")
    ax.set_yticks(range(len(VARIANTS)), list(VARIANTS.values()))
    ax.set(ylim=(len(VARIANTS) - 0.5, -0.9), xlabel="perplexity lost, %, paired by window of text")
    fig.suptitle("8-bit weights and states cost little; rounding each token's inputs costs most")
    name_results(fig, results, "perplexity_lost_pct")
    return fig


def table_1_rows(recorded: Result | None, now: Result) -> Rows:
    """Table 1's rows, and SmolLM2's below them: perplexity where the paper has accuracy."""
    rows: Rows = [
        {"model": f"{model}, paper", "bits": bits, "accuracy, average of 3 tasks, %": accuracy}
        for model, pair in _PAPER.items()
        for bits, accuracy in zip((16, 8), pair, strict=True)
    ]
    for drawn in over(recorded, now):
        summary, named = drawn.result.summary, f"SmolLM2-135M, {drawn.who()}"
        plain = summary.of("perplexity", variant=PLAIN)
        rows.append({"model": named, "bits": 16, "perplexity": interval(plain, 2)})
        for variant, name in VARIANTS.items():
            lost = summary.get("perplexity_lost_pct", variant=variant, than=PLAIN)
            same = summary.get("same_token_pct", variant=variant, than=PLAIN)
            if lost is not None:
                row = {
                    "model": named,
                    "bits": f"8: {name}",
                    "perplexity": f"{plain['value'] * (1 + lost['value'] / 100):.2f}",
                }
                row |= {"lost, %, paired": interval(lost, 2), "same likeliest token, %": interval(same, 1)}
                rows.append(row)
    return rows


def speed_rows(recorded: Result | None, now: Result) -> Rows:
    """Tokens a second of all layers in 16 bits and by both products of 8, how much slower these are, by requests."""
    paper = {1: "5", 8: "negligible", 32: "negligible"}
    rows = []
    for drawn in over(recorded, now):
        summary = drawn.result.summary
        for batch in drawn.result.parameters["eight_bits"]["batches"]:
            for name, label in STEP_NAMES.items():
                rows.append(
                    {
                        "requests": batch,
                        "weights": label,
                        "tokens/s": interval(summary.of("tokens_per_s", variant=name, batch=batch), 1),
                        "slower, %": interval(summary.get("slower_pct", variant=name, batch=batch, than=WHOLE), 1),
                        "slower in the paper, %": paper.get(batch, "") if name == "8_bits" else "",
                        "whose": drawn.who(),
                    }
                )
    return rows


def byte_rows(recorded: Result | None, now: Result) -> Rows:
    """Bytes in 8 bits over those in 16, and the share of outliers, beside the paper's."""
    said = {
        "weights, of their 16-bit bytes": ("about half", "bytes_x", {"variant": "weights", "than": WHOLE}),
        "hidden states on the wire, of their 16-bit bytes": ("half", "bytes_x", {"variant": "states", "than": WHOLE}),
        "outliers, %": ("0.1", "outliers_pct", {}),
    }
    return [
        {
            "what": what,
            "paper": paper,
            "recorded": None if recorded is None else recorded.summary.value(measure, **where),
            "measured": now.summary.value(measure, **where),
        }
        for what, (paper, measure, where) in said.items()
    ]
