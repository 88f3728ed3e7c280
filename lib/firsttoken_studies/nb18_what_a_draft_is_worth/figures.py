"""The picture that notebook 18 opens with, its figure and its table, drawn from results alone."""

from __future__ import annotations

from firsttoken.study.summary import Entry
from firsttoken_studies.nb18_what_a_draft_is_worth.burst import LATE
from firsttoken_studies.nb18_what_a_draft_is_worth.first_answers import LAYERS, LOSSLESS, PLAIN, WAITS
from firsttoken_studies.nb18_what_a_draft_is_worth.study import HEALED
from firsttoken_studies.nb18_what_a_draft_is_worth.waiting import DISTANCE, UNIFORM
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, Figure, panels
from firsttoken_studies.record.results import Result, Rows, distinct
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

STARTS = {PLAIN: "whole model, plain", LOSSLESS: "whole model, coded without loss", LAYERS: "layers wait, drafts"}
STARTS |= {LAYERS + WAITS: "layers wait, no drafts"}
BURSTS = {PLAIN: "whole model", LAYERS: "layers wait"}
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
    names = {HEALED: "layers wait, healed", "bits": "sign, exponent, 2 bits"}
    return f"layers {waits} wait" if waits != variant else names.get(variant, variant)


def kept(recorded: Result | None, now: Result | None) -> Figure:
    """The share of drafted tokens that the whole model keeps, by what had arrived; a panel for each task."""
    results = over(recorded, now)
    rows = [row for shown in results for row in shown.result.rows]
    tasks, share = distinct(rows, "task"), {row["variant"]: row["first_share"] for row in rows}
    names = sorted(share, key=lambda name: ("wait" in named(name), -share[name]))
    fig, axes = panels(1, len(tasks), figsize=(3 + 2.4 * len(tasks), 4), sharey=True)
    for ax, task in zip(axes, tasks, strict=True):
        ax.axvline(HALF, color=COLOURS["target"], linestyle="--", linewidth=1)
        for shown in results:
            for row, name in enumerate(names):
                entry = shown.result.summary.get("kept_pct", variant=name, task=task)
                look = "ours" if name == HEALED else "none" if "later" in name else "measured"
                shown.point(ax, row + shown.shift, entry, look, along="x")
        ax.set(title=task, xlabel="% of a draft that stays", xlim=(-3, 103))
    axes[0].set_yticks(range(len(names)), [f"{named(name)} ({share[name]:.0%} of the bytes)" for name in names])
    axes[0].invert_yaxis()
    name_results(fig, results, "kept_pct")
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
            "same word in its place, %": interval(get("same_pct", **entry["where"])),
            "n": str(get("kept", **entry["where"])["n"]),
        }
        for entry in result.summary.all("byte_share")
    ]


def answers(recorded: Result | None, now: Result | None) -> Figure:
    """Seconds to the last token of the whole model's answer, by start; hollow: to its first. A panel for each task."""
    results = over(recorded, now)
    rows = [row for shown in results for row in shown.result.rows]
    tasks, names = distinct(rows, "task"), distinct(rows, "variant")
    names = sorted(names, key=lambda name: (name not in (PLAIN, LOSSLESS), LAYERS not in name))
    fig, axes = panels(1, len(tasks), figsize=(10, 3.6), sharey=True)
    for ax, task in zip(axes, tasks, strict=True):
        (size, *_), (rate, *_) = (distinct(rows, key, variant=PLAIN, task=task) for key in ("bytes", "gbit_per_s"))
        ax.axvline(8 * size / (rate * 1e9), color=LOOKS["floor"].colour, linestyle=":")
        for shown in results:
            get = shown.result.summary.get
            for row, name in enumerate(names):
                look = "S0" if name in (PLAIN, LOSSLESS) else "none" if name.endswith(WAITS) else "measured"
                shown.point(ax, row + shown.shift, get("answer_s", variant=name, task=task), look, along="x")
                if (first := get("first_s", variant=name, task=task)) is not None:
                    ax.plot(
                        first["value"],
                        row + shown.shift,
                        LOOKS[look].marker,
                        color=COLOURS[look],
                        markerfacecolor="white",
                    )
        ax.set_title(task)
        ax.set_xlim(left=0)
    axes[len(axes) // 2].set_xlabel("s from the start (dotted: plain bytes)")
    axes[0].set_yticks(range(len(names)), [STARTS.get(name, f"{named(name)}, drafts") for name in names])
    axes[0].invert_yaxis()
    name_results(fig, results, "answer_s")
    return fig


def answer_rows(result: Result) -> Rows:
    """Every start and task: seconds to the final answer's first and last token, and over those of plain starts."""
    get, sizes = result.summary.get, {row["variant"]: row["bytes"] for row in result.rows}
    return [
        {
            "start": f"{STARTS.get(entry['where']['variant'], entry['where']['variant'])}, {entry['where']['task']}",
            "bytes": f"{sizes[entry['where']['variant']] / sizes[PLAIN]:.2f}",
            "kept, %": interval(get("kept_pct", **entry["where"])),
            "first token, s": interval(get("first_s", **entry["where"]), 2),
            "answer, s": interval(entry, 2),
            "over whole": interval(get("answer_x", **entry["where"], than=PLAIN), 2),
            "over lossless": interval(get("answer_x", **entry["where"], than=LOSSLESS), 2),
            "n": str(entry["n"]),
        }
        for entry in result.summary.all("answer_s")
    ]


def burst_rows(result: Result) -> Rows:
    """Every start: when the last layer came, how long behind it the last of many prompts had its first token."""
    get = result.summary.get

    def shown(measure: str, entry: Entry, digits: int, ending: str = "") -> str:
        labels = entry["where"] | {"variant": entry["where"]["variant"] + ending}
        return interval(get(measure, **labels), digits)

    return [
        {
            "start": f"{BURSTS.get(name := entry['where']['variant'], f'{name} first')}, {entry['where']['link']}",
            "last layer after, s": shown("loaded_s", entry, 2),
            "over that with nobody waiting": shown("loaded_x", entry, 3),
            "last first token behind it, s": shown("behind_s", entry, 2),
            "in steps": shown("behind_steps", entry, 1),
            "asked when loaded, s": shown("behind_s", entry, 2, LATE),
            "starts": str(entry["n"]),
        }
        for entry in result.summary.all("loaded_x")
    ]


def waiting_rows(result: Result) -> Rows:
    """Every rule: what waits, the bytes that come first, and the share of an answer that its draft would have had."""
    get, plans = result.summary.get, {(row["variant"], row["case"]): row["plan"] for row in result.rows}
    return [
        {
            "chosen": f"{entry['where']['case']}: {entry['where']['variant']}",
            "what": _by_split(plans[entry["where"]["variant"], entry["where"]["case"]]),
            "bytes first": f"{get('byte_share', **entry['where'])['value']:.3f}",
            "kept, % of an answer": interval(entry),
            "gain, points": interval(
                get("gain_points", **entry["where"], than=DISTANCE if entry["where"]["case"] == LAYERS else UNIFORM)
            ),
            "n": str(entry["n"]),
        }
        for entry in result.summary.all("kept_pct")
    ]


def _by_split(plan: str) -> str:
    """The layers of each split, of a plan that names the split of each layer."""
    pairs = [part.removeprefix("layer ").split(": ") for part in plan.split(", ") if ": " in part]
    layers = {split: [layer for layer, other in pairs if other == split] for split in sorted({s for _, s in pairs})}
    return "; ".join(f"{split}: {', '.join(numbers)}" for split, numbers in layers.items()) or plan
