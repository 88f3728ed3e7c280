"""The picture that notebook 12 opens with, and the figure of its live healing."""

from __future__ import annotations

from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, Figure, categories, panels
from firsttoken_studies.record.results import Result
from firsttoken_studies.record.schematic import Schematic

BLOCK = (3, 4)  # of the eight layers that the picture has
TERMS = {"answer_loss": ("report", "on the answers"), "distill_loss": ("ours", "from the full model's predictions")}
JUDGED = {"answers": "answer_nll", "text": "text_nll"}  # what validation says at the end, in nats a token


def schematic() -> Schematic:
    """Draw what the adapters of a stage learn from: the answers, and the predictions of the full model."""
    alt = (
        "The full model has eight layers. Stage 1 lacks two of them, and hands on what enters these. A thin adapter "
        "beside each of the other layers is trained to make up for the two: on the right answers, and on what the full "
        "model predicts for every token."
    )
    sketch = Schematic(20, 6.3, alt)
    sketch.text(0.3, 0.5, "Adapters learn to make up for the layers that have not come", heading=True)
    sketch.text(0.3, 1.7, "full model")
    sketch.text(0.3, 4.1, "stage 1")
    sketch.text(0.3, 5.2, "adapters")
    for layer in range(8):
        x, passed = 3 + 1.3 * layer, layer in BLOCK
        sketch.box(x, 1.2, look="S3", width=1.25)
        sketch.box(x, 3.6, "pass" if passed else "", "S1", width=1.25, missing=passed)
        if not passed:
            sketch.box(x, 4.9, look="ours", width=1.25, height=0.55)
    sketch.arrow((13.5, 1.7), (15.2, 1.7))
    sketch.text(15.4, 1.7, "its predictions", heading=True)
    sketch.arrow((15.2, 2.3), (13.6, 5.0), look="ours")
    sketch.text(15.4, 3.9, "the right answers", heading=True)
    sketch.arrow((15.2, 4.2), (13.6, 5.2), look="ours")
    sketch.text(15.4, 5.2, "teach the adapters")
    return sketch


def healing_course(recorded: Result | None, now: Result) -> Figure:
    """The two losses of each step of a healing from scratch, each run by its own functions; and what validation, the
    same for all, says after the last step."""
    results = over(recorded, now)
    fig, (ax, after) = panels(1, 2, figsize=(9, 4.2), width_ratios=(1.5, 1))
    for shown in results:
        rows, look = shown.result.rows, {"linestyle": "-"}
        for term, (name, label) in TERMS.items():
            entries = [{"value": row[term]} if term in row else None for row in rows]
            shown.line(ax, [row["step"] for row in rows], entries, name, label=None if shown.library else label, **look)
        for position, measure in enumerate(JUDGED.values()):
            entry = shown.result.summary.get(measure, task="validation", stage=1)
            shown.point(after, position + shown.shift, entry, "measured", along="x")
    categories(after, JUDGED)
    after.set(xlabel="validation afterwards, nats a token", xlim=(0, None))
    steps = [row["step"] for row in now.rows]
    ax.set(xlabel="step", ylabel="loss, nats a token", ylim=(0, None), xticks=steps[:: 1 + len(steps) // 12])
    first, last = (sum(row.get(term, 0.0) for term in TERMS) for row in (now.rows[0], now.rows[-1]))
    verb = "falls" if last < first else "rises"
    fig.suptitle(f"From scratch, in {len(steps)} steps, the loss {verb} from {first:.1f} to {last:.1f} nats")
    legend(fig, ax, results)
    return fig


def validation_course(result: Result) -> Figure:
    """Draw F1 and perplexity on validation over the steps of each adapter's training."""
    fig, axes = panels(1, 2, figsize=(9, 4.0))
    frame = result.frame().dropna(subset="validation_f1")
    for adapter, name in (("A-ours", "S1"), ("AB-ours", "S2")):
        rows, look = frame[frame.adapter == adapter], {"color": COLOURS[name], "marker": LOOKS[name].marker}
        axes[0].plot(rows.step, 100 * rows.validation_f1, **look, label=f"stage {name[1]}")
        axes[1].plot(rows.step, rows.validation_perplexity, **look)
    axes[0].set(xlabel="step", ylabel="validation F1, %", xlim=(0, None), ylim=(0, None))
    axes[1].set(xlabel="step", ylabel="validation perplexity", xlim=(0, None), ylim=(0, None))
    axes[0].legend(fontsize="small")
    (first, last), steps = frame[frame.adapter == "A-ours"].validation_f1.iloc[[0, -1]], frame.step.agg(["min", "max"])
    fig.suptitle(f"Stage 1: F1 {100 * first:.0f} % after {steps['min']} steps, {100 * last:.0f} % after {steps['max']}")
    return fig
