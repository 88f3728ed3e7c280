"""The figures and tables of notebook 43: what a batch costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from firsttoken.study.summary import Entry
from firsttoken_studies.nb43_the_cost_of_a_batch.study import PAST_TILE, table_pieces
from firsttoken_studies.record.overlay import DrawnResult, counted, legend, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, log_ticks, panels
from firsttoken_studies.record.results import Result, Rows, Table, distinct
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def schematic() -> Schematic:
    """Draw that a chunk keeps arithmetic busy and decodes keep memory busy."""
    alt = (
        "A chunk of a prompt keeps the arithmetic of the GPU busy, and a step of decodes its memory, since all weights "
        "are read for a few tokens. In two steps the weights are read twice. In one step the decodes use weights that "
        "are read for the chunk anyway, and that step takes hardly longer than the chunk's."
    )
    sketch = Schematic(22, 7.6, alt)
    sketch.text(0.2, 0.4, "Two steps: the weights are read twice", heading=True)
    sketch.text(0.2, 4.2, "One step: the decodes ride along", heading=True)
    for y, starts, end in ((0.9, (4, 13.2), 18.2), (4.7, (4,), 13.7)):
        sketch.text(0.2, y + 0.5, "arithmetic")
        sketch.text(0.2, y + 1.6, "memory")
        sketch.box(4, y, "a chunk of 512 tokens", "prefill", width=9)
        for start in starts:
            sketch.box(start, y + 1.1, "read all weights", "weights", width=5)
        sketch.box(max(starts[-1], 13), y, "", "online", width=0.7)
        sketch.text(max(starts[-1], 13) + 0.9, y + 0.5, "decodes")
        sketch.arrow((4, y + 2.45), (end, y + 2.45))
        sketch.text(end + 0.3, y + 2.45, "time")
    return sketch


PAPER = {  # prefill in pieces over whole, by prompt and piece: artifact of the paper, chunking-overhead.csv (Yi-34B)
    2047: {512: 1.152, 1024: 1.175, 2048: 0.999},
    4095: {512: 1.189, 1024: 1.202, 2048: 1.024},
    8191: {512: 1.117, 1024: 1.109, 2048: 0.937},
    16383: {512: 0.995, 1024: 0.961, 2048: 0.805},
}
DASHES = ("-", "--", ":")
TABLE_LINE = f"{LOOKS['chunks alone'].marker}-"


def table_costs(recorded: Result | None, now: Result) -> Figure:
    """Draw from the cost table what a token costs in a prompt by itself and in a batch that decodes, and what a chunk
    and decodes cost in one step over what they cost in two."""
    results = over(recorded, now)
    fig, (ax, mixed) = panels(1, 2, figsize=(9, 4.4), width_ratios=(3, 2))
    rows = [row for shown in results for row in shown.result.rows]
    contexts = sorted(distinct(rows, "context", what="table", of="decode"))
    for shown in results:
        prompts, decodes = (shown.result.frame(what="table", of=kind) for kind in ("prefill", "decode"))
        shown.line(ax, prompts.tokens, _entries(prompts.ms / prompts.tokens), "chunks alone")
        for context, dashes in zip(contexts, DASHES, strict=False):
            context_decodes = decodes[decodes.context == context]
            places, entries = context_decodes.requests, _entries(context_decodes.ms / context_decodes.requests)
            shown.line(ax, places, entries, "measured", linestyle=dashes, marker="s")
        sizes = shown.result.parameters["batch_cost"]["table_pieces"]
        labels = {"source": "table", "than": "apart"}
        together = [shown.result.summary.get("mixed_x", budget_tokens=size, **labels) for size in sizes]
        shown.line(mixed, sizes, together, "sarathi")
    mixed.axhline(1, color=COLOURS["floor"], linestyle=":")
    mixed.set(xlabel="tokens of the chunk", ylabel="with decodes / a step for each")
    mixed.set_title("chunk and decodes in one step", fontsize=10.5)
    ax.plot([], [], TABLE_LINE, color=COLOURS["chunks alone"], label="prompt alone, by its tokens")
    for context, dashes in zip(contexts, DASHES, strict=False):
        label = f"decodes over {context:,} tokens each, by requests"
        ax.plot([], [], "s", ls=dashes, color=COLOURS["measured"], label=label)
    ax.plot([], [], "o-", color=COLOURS["sarathi"], label="a chunk and decodes, in one step over two")
    ax.set(yscale="log", xlabel="tokens of the step", ylabel="ms a token")
    for panel in (ax, mixed):
        _ticks(panel)
    ax.set_title(_tables(results), fontsize=10.5)
    prompts, decodes = (results[0].result.frame(what="table", of=kind) for kind in ("prefill", "decode"))
    alone, least = decodes.ms[decodes.requests == 1].min(), (prompts.ms / prompts.tokens).min()
    fig.suptitle(f"A decode alone costs {alone / least:.0f} times a token of a large prompt", fontsize=12)
    legend(fig, ax, results, columns=2)
    return fig


def live_costs(recorded: Result | None, now: Result) -> Figure:
    """Live: a step by the size of its chunk, alone and beside decodes; and what pieces cost over the whole prompt."""
    results = over(recorded, now)
    fig, (steps, pieces) = panels(1, 2, figsize=(9, 4.6))
    configs = [shown.result.parameters["batch_cost"] for shown in results]
    contexts = sorted({context for config in configs for context in config["contexts"]})
    cases = [(0, "measured", "-"), *((c, "sarathi", d) for c, d in zip(contexts, DASHES, strict=False))]
    for shown, config in zip(results, configs, strict=True):
        for prompt in config["table_prompts"]:
            ratios = [table_pieces(shown.result.rows, prompt, piece) for piece in config["table_pieces"]]
            shown.line(pieces, config["table_pieces"], _entries(ratios), "chunks alone", markersize=4)
        if shown.library:
            continue  # no live step depends on how the table's parts are added up
        sizes = [*config["pieces"], config["prompt"]]
        step_ms = shown.result.frame(what="live").groupby(["context", "new"]).ms.median()  # of steps with a whole piece
        for context, name, dashes in cases:
            entries = [{"value": step_ms[context, size]} if (context, size) in step_ms else None for size in sizes]
            shown.line(steps, sizes, entries, name, linestyle=dashes, markersize=5)
        decode = np.median(shown.result.frame(what="decode").ms)
        steps.axhline(decode, color=COLOURS["floor"], linestyle=":", **shown.style)
        live = [_live_pieces(shown.result, piece) for piece in config["pieces"]]
        shown.line(pieces, config["pieces"], live, "measured")
    for paper_value in PAPER.values():
        pieces.plot(list(paper_value), list(paper_value.values()), "|-", color=COLOURS["paper"], zorder=3)
    pieces.axhline(1, color=COLOURS["floor"], linestyle=":")
    steps.plot([], [], "o-", color=COLOURS["measured"], label="live: a chunk alone, pieces of a prompt")
    for context, name, dashes in cases[1:]:
        label = f"live: beside {configs[0]['running']} decodes over {context:,} tokens"
        steps.plot([], [], "o", ls=dashes, color=COLOURS[name], label=label)
    steps.plot([], [], ":", color=COLOURS["floor"], label="decodes alone; the whole prompt")
    steps.plot([], [], "|-", color=COLOURS["paper"], label="paper: Yi-34B, 2,047 to 16,383 tokens")
    steps.plot([], [], TABLE_LINE, color=COLOURS["chunks alone"], label=_tables(results))
    repeats = counted(results, "prefill_x", source="live", **PAST_TILE)
    steps.set_title(f"median step ({repeats} repeats)", fontsize=10.5)
    steps.set(yscale="log", xlabel="tokens of the chunk", ylabel="ms a step")
    pieces.set_title("a prompt in pieces over the whole one, 95 %", fontsize=10.5)
    pieces.set(yscale="log", xlabel="tokens of a piece", ylabel="time / that of the whole prompt")
    for ax in (steps, pieces):
        _ticks(ax)
    low, high = pieces.get_ylim()
    pieces.set_yticks([tick for tick in (0.8, 1, 1.2, 1.5, 2, 2.5, 4, 6) if low < tick < high])
    end_points = [(piece, _live_pieces(results[0].result, piece)["value"]) for piece in sorted(configs[0]["pieces"])]
    (small, slow), (large, quick) = end_points[0], end_points[-1]
    message = f"{large} tokens take {quick:.2f} of a whole prompt's time, pieces of {small} take {slow:.2f}"
    fig.suptitle(f"Live, pieces of {message}", fontsize=12)
    legend(fig, steps, results, columns=2)
    return fig


def piece_rows(result: Result) -> Table:
    """Live, by the size of a piece: over the whole prompt, and together with decodes over one of each."""
    for piece in result.parameters["batch_cost"]["pieces"]:
        mixed = result.summary.of("mixed_x", source="live", budget_tokens=piece, than="apart")
        row = {"tokens of a piece": piece, "time / whole prompt": interval(_live_pieces(result, piece), 2)}
        yield row | {"with decodes / apart": interval(mixed, 2)}


def table_rows(result: Result) -> Table:
    """Yield the cost of pieces and of mixed steps by the cost table, of pieces the worst over its prompts."""
    value = result.summary.value
    for piece in result.parameters["batch_cost"]["table_pieces"]:
        labels = {"source": "table", "budget_tokens": piece}
        yield {
            "tokens of a piece": piece,
            "time / whole prompt, at most": f"{value('prefill_x', **labels, than='whole', across='worst'):.2f}",
            "with decodes / apart": f"{value('mixed_x', **labels, than='apart'):.2f}",
        }


def tile_rows(result: Result) -> Rows:
    """A token more than a tile, beside the paper's."""
    live, table = (result.summary.of("prefill_x", source=source, **PAST_TILE) for source in ("live", "table"))
    return [
        {"what": "257 tokens / 256", "paper (A100)": 1.32, "live": interval(live, 2), "table": f"{table['value']:.2f}"}
    ]


def _live_pieces(result: Result, piece: int) -> Entry:
    return result.summary.of("prefill_x", source="live", budget_tokens=piece, than="whole")


def _entries(values: Iterable[float]) -> list[Entry]:
    """Values without intervals, as entries of a summary."""
    return [{"value": value} for value in values]


def _tables(shown: Sequence[DrawnResult]) -> str:
    """The cost tables of the results, those of the record first."""
    costs = [result_drawn.result.parameters["hardware"]["costs"] for result_drawn in shown]
    return f"by the table of {', yours of '.join(dict.fromkeys(costs))}"


def _ticks(ax: Axes) -> None:
    """Set the ticks of tokens at powers of two, and of a logarithmic height at round numbers."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    if ax.get_yscale() == "log":
        log_ticks(ax.yaxis)
