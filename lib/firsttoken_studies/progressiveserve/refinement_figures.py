"""The figures and tables of refinement under load (notebook 17), drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken_studies.progressiveserve.refinement import AGAIN, ANSWER_TOKENS, KEPT, STILL, WHOLE, refining
from firsttoken_studies.progressiveserve.timeline import token_gaps
from firsttoken_studies.record.plot import COLOURS, LOOKS, panels
from firsttoken_studies.record.results import Result, Rows, Table, rows_where
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CASES = {
    WHOLE: "the plain model, in one stage",
    STILL: "first bits, nothing comes",
    KEPT: "planes come, what was written is kept",
    AGAIN: "planes come, prefilled again",
}
HANDOVERS = {
    "coarse": ("none", "no hand-over: weights stay coarse"),
    "kept": ("naive", "exact weights, old keys and values"),
}


def refinement(result: Result) -> Figure:
    """Left, the gaps between tokens over time in one run, with planes that come (shaded) and without; right, the
    divergence from exact weights on exact keys and values by position after the hand-over."""
    fig, (divergence_panel, right) = panels(1, 2, figsize=(11, 4.2))
    for case, look in ((STILL, "other"), (KEPT, "measured")):
        rows = rows_where(result.rows, case=case, run=0)
        gaps = sorted((high, 1000 * (high - low)) for low, high in token_gaps(rows, "client"))
        if gaps:
            colour, marker = LOOKS[look]
            divergence_panel.plot(*zip(*gaps, strict=True), marker, color=colour, markersize=4, label=CASES[case])
        if window := refining(rows):
            divergence_panel.axvspan(*window, color=COLOURS["single"], alpha=0.25, linewidth=0, label="planes come")
    divergence_panel.set(
        xlabel="s from the server's start", ylabel="gap between two tokens of a client, ms", ylim=(0, None)
    )
    divergence_panel.legend(loc="upper center", bbox_to_anchor=(0.5, 1.3), fontsize=9)
    _draw_divergence(right, result)
    return fig


def _draw_divergence(ax: Axes, result: Result) -> None:
    frame = result.frame(row="handover").query("position > 0")
    for (context, context_rows), line in zip(
        frame.groupby("context_tokens", sort=False), ("-", "--", ":"), strict=False
    ):
        for name, (look, label) in HANDOVERS.items():
            means = context_rows.groupby("position")[f"kl_{name}"].mean()
            ax.plot(means.index, means, line, color=COLOURS[look], label=f"{label}, {context} tokens")
    ax.set(xlabel="tokens after the hand-over", ylabel="KL from the exact model, nats", yscale="log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.3), fontsize=9)


def load_rows(result: Result) -> Table:
    """Every timeline: a step, the longest gap while planes came, and the peak over the model."""
    summary = result.summary
    for case, name in CASES.items():
        if summary.get("short_requests", case=case):
            yield {
                "timeline": name,
                "step, ms": interval(summary.get("step_ms", case=case)),
                "planes came for, s": interval(summary.get("refining_s", case=case), 2),
                "longest gap meanwhile, ms": interval(summary.get("longest_gap_ms", case=case), 0),
                "of a step": interval(summary.get("longest_gap_x", case=case, than="step"), 2),
                f"first answer of {ANSWER_TOKENS} tokens, s": interval(summary.get("first_answer_s", case=case), 2),
                "/ plain start's": interval(summary.get("first_answer_x", case=case, than=WHOLE), 2),
                "peak memory / model": interval(summary.get("peak_memory_x", case=case, than="model"), 2),
                "/ plain model's": interval(summary.get("peak_memory_x", case=case, than=WHOLE), 2),
            }


def merge_rows(result: Result) -> Rows:
    """Return the rate at which planes are merged, and its ratio to a copy's rate in the same memory."""
    summary = result.summary
    measured = {
        "merged, GB/s of 16-bit weights": interval(summary.get("merge_gb_per_s"), 2),
        "of the rate of a copy": interval(summary.get("merge_x", than="copy"), 3),
        "longest merge between two steps, ms": interval(summary.get("longest_merge_ms"), 1),
        "logits of the end bit by bit the plain model's": interval(summary.of("same_logits")),
    }
    return [{"what": name, "measured": shown} for name, shown in measured.items()]


def handover_table(result: Result) -> Table:
    """Return by context KL and agreement with kept keys and values and with coarse weights; a new prefill's time."""
    summary = result.summary
    for context in result.parameters["refinement"]["contexts"]:
        kept_labels, coarse = ({"case": case, "context_tokens": context} for case in ("kept", "coarse"))
        yield {
            "context, tokens": context,
            "kept: KL at once": interval(summary.of("kl_first_nats", **kept_labels), 4),
            "kept: KL": interval(summary.of("kl_nats", **kept_labels), 4),
            "kept: same next, %": interval(summary.of("same_token_pct", **kept_labels)),
            "coarse: KL": interval(summary.of("kl_nats", **coarse), 4),
            "coarse: same next, %": interval(summary.of("same_token_pct", **coarse)),
            "prefill again, ms": interval(summary.of("redo_ms", context_tokens=context)),
        }
