"""The picture that notebook 62 opens with, its figure of first tokens by turn, and its table."""

from __future__ import annotations

from collections.abc import Sequence

from firsttoken_studies.droidspeak.decoding import DROIDSPEAK, OWN_CACHE, REUSE
from firsttoken_studies.droidspeak.decoding import OWN as FULL
from firsttoken_studies.record.overlay import DrawnResult, name_results, over
from firsttoken_studies.record.plot import Figure, categories, panels
from firsttoken_studies.record.results import Result, Rows
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import cells

LOOK = {FULL: "other", OWN_CACHE: "sender", REUSE: "full reuse", DROIDSPEAK: "droidspeak"}
WAYS = tuple(LOOK)


def way_rows(result: Result) -> Rows:
    """A line a way: times sooner than behind full prefills, and how good the answers are."""
    columns = {
        "first token, times sooner": ("ttft_x", 2, {"than": FULL}),
        "from turn 3 on": ("ttft_x", 2, {"than": FULL, "case": "from turn 3 on"}),
        "last token, times sooner": ("ended_x", 2, {"than": FULL}),
        "turns a second, several at once": ("throughput_x", 2, {"than": FULL}),
        "the reviewer's F1": ("score", 3),
        "of its own, %": ("score_kept_pct", 1, {"than": FULL}),
    }
    return [{"what is kept": way} | cells(result.summary, columns, method=way) for way in WAYS]


def schematic() -> Schematic:
    """Draw a request's blocks in the pool, and the cache by layers that another agent takes out of them."""
    alt = (
        "The writer's keys and values lie in blocks anywhere in the engine's pool. They are copied out in the order of "
        "the tokens. The reviewer takes most layers as they are, computes one group of layers again, and has its first "
        "token sooner than if it read the whole text itself."
    )
    sketch = Schematic(20, 6.6, alt)
    sketch.text(0.2, 0.45, "The writer's blocks, anywhere in the pool", heading=True)
    for position, block in enumerate(("2", "", "1", "", "", "3", "")):
        sketch.box(0.2 + position, 1, block, "sender" if block else "other", missing=not block)
    sketch.arrow((3.7, 2.2), (3.7, 3.9))
    sketch.text(4, 3, "copied out, in the order of the tokens")
    for position in range(3):
        sketch.box(2.2 + position, 4, str(position + 1), "sender")
    sketch.arrow((5.5, 4.5), (12.3, 4.5), "to the reviewer")
    sketch.text(12.5, 0.45, "What the reviewer does", heading=True)
    for layer, look in enumerate(("full reuse", "recompute", "recompute", "full reuse", "full reuse")):
        sketch.box(12.5, 1 + layer, "computed again" if look == "recompute" else "taken", look, width=4)
    sketch.text(16.8, 1.5, "last layer")
    sketch.text(16.8, 5.5, "first layer")
    return sketch


def by_turn(recorded: Result | None, now: Result) -> Figure:
    """Seconds to the first token of each turn, a line a way; and how much its words are those behind a full prefill.

    A reader's copy out of the pool changes the words alone; times differ by chance from run to run.
    """
    fig, (ax, words) = panels(1, 2, figsize=(9, 4.4), width_ratios=(1.7, 1))
    results = over(recorded, now)
    for result_drawn in results:
        for position, way in enumerate(WAYS[1:]):
            entry = result_drawn.result.summary.get("words_f1", method=way, than=FULL)
            result_drawn.point(words, position + result_drawn.shift, entry, LOOK[way], along="x")
        if result_drawn.library:
            continue
        turns = range(1, result_drawn.result.parameters["agents"]["turns"] + 1)
        for way in WAYS:
            entries = [result_drawn.result.summary.get("ttft_s", method=way, case=f"turn {turn}") for turn in turns]
            result_drawn.line(
                ax, turns, entries, LOOK[way], label=way if result_drawn.own or result_drawn.alone else None
            )
    ax.set(xlabel="turn: odd ones are the writer's, even ones the reviewer's", ylabel="time to first token, s")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="small")
    categories(words, WAYS[1:])
    words.set(xlabel="words as behind a full prefill, F1", xlim=(-0.05, 1.1))
    fig.suptitle(_sooner(results), fontsize=11)
    name_results(fig, results, "ttft_x")
    return fig


def _sooner(results: Sequence[DrawnResult]) -> str:
    """Return by how much the first token comes sooner behind the other's cache, or later, in each of the runs."""
    sentences = []
    for result_drawn in results:
        entry = result_drawn.result.summary.get("ttft_x", method=DROIDSPEAK, than=FULL)
        if entry and not result_drawn.library:
            factor, whose = entry["value"], "your run" if result_drawn.own else "the record"
            times = f"{factor:.1f} times sooner" if factor >= 1 else f"{1 / factor:.1f} times later"
            sentences.append(f"{times} in {whose}")
    return "Behind the other's cache, half computed again, the first token comes\n" + ", ".join(sentences)
