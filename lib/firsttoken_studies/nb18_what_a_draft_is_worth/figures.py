"""The picture that notebook 18 opens with, its figure and its table, drawn from results alone."""

from __future__ import annotations

from firsttoken_studies.nb18_what_a_draft_is_worth.study import HEALED
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import COLOURS, Figure, panels
from firsttoken_studies.record.results import Result, Rows, distinct
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

HALF = 50  # % of a draft that must stay for it to be worth a client's reading


def schematic() -> Schematic:
    """Draw a draft, what the whole model says to it, and what is taken back."""
    alt = (
        "What has arrived of a model drafts five tokens. The whole model reads prompt and draft in one prefill: three "
        "it would have said itself, and another fourth. These stay, the fourth is its own, the fifth is taken back."
    )
    sketch = Schematic(20, 6.4, alt)
    sketch.text(0.3, 0.5, "Drafted by what has arrived, verified by the whole model", heading=True)
    for row, (label, words) in enumerate(
        (("a stage drafts", "the sea is very wide"), ("the whole model", "the sea is blue"), ("the answer", ""))
    ):
        sketch.text(0.3, 1.9 + 1.6 * row, label)
        for column, word in enumerate((words or "the sea is blue").split()):
            wrong = not row and column > 2
            sketch.box(
                4.8 + 3 * column, 1.4 + 1.6 * row, word, "none" if wrong else "measured", width=2.6, missing=wrong
            )
    sketch.text(16.8, 3.5, "one prefill", align="left")
    return sketch


def named(variant: str) -> str:
    """Return the name of a cut in figures and tables."""
    waits = variant.removeprefix("lossless, ").removesuffix(" later")
    return f"layers {waits} wait" if waits != variant else "8 layers wait, healed" if variant == HEALED else variant


def kept(recorded: Result | None, now: Result | None) -> Figure:
    """The share of drafted tokens that the whole model keeps, over the bytes that had come; a panel for each task."""
    results = over(recorded, now)
    tasks = distinct([row for shown in results for row in shown.result.rows], "task")
    fig, axes = panels(1, len(tasks), figsize=(4 + 3 * len(tasks), 4.4), sharey=True)
    for ax, task in zip(axes, tasks, strict=True):
        ax.axhline(HALF, color=COLOURS["target"], linestyle="--", linewidth=1)
        for shown in results:
            for name in distinct(shown.result.rows, "variant"):
                if (entry := shown.result.summary.get("kept_pct", variant=name, task=task)) is None:
                    continue
                x = shown.result.summary.value("byte_share", variant=name, task=task)
                look = "ours" if name == HEALED else "none" if "later" in name else "measured"
                shown.point(ax, x, entry, look)
                if shown is results[0]:
                    ax.annotate(named(name), (x, entry["value"]), (5, 5), textcoords="offset points", fontsize=7)
        ax.set(title=task, xlabel="bytes before the first token / all", ylim=(-3, 103))
    axes[0].set_ylabel("% of a draft that stays")
    legend(fig, axes[0], results, "kept_pct")
    return fig


def kept_rows(result: Result) -> Rows:
    """Every cut and task: the bytes that had come, tokens kept, and shares of the draft."""
    get = result.summary.get
    return [
        {
            "had arrived": f"{named(entry['where']['variant'])}, {entry['where']['task']}",
            "bytes first": f"{entry['value']:.3f}",
            "tokens kept": interval(get("kept", **entry["where"])),
            "kept, %": interval(get("kept_pct", **entry["where"])),
            "same word anywhere, %": interval(get("same_pct", **entry["where"])),
            "n": str(get("kept", **entry["where"])["n"]),
        }
        for entry in result.summary.all("byte_share")
    ]
