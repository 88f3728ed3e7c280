"""The figures and tables of notebook 43: what a batch costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from firsttoken.study.summary import Entry
from firsttoken_studies.record.overlay import Drawn, counted, legend, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, log_ticks, panels
from firsttoken_studies.record.results import Result, Rows, Table, distinct
from firsttoken_studies.record.show import interval
from firsttoken_studies.sarathi.batch_cost import PAST_TILE, table_pieces

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PAPER = {  # prefill in pieces over whole, by prompt and piece: artifact of the paper, chunking-overhead.csv (Yi-34B)
    2047: {512: 1.152, 1024: 1.175, 2048: 0.999},
    4095: {512: 1.189, 1024: 1.202, 2048: 1.024},
    8191: {512: 1.117, 1024: 1.109, 2048: 0.937},
    16383: {512: 0.995, 1024: 0.961, 2048: 0.805},
}
DASHES = ("-", "--", ":")
TABLE_LINE = f"{LOOKS['chunks alone'].marker}-"


def table_costs(recorded: Result | None, now: Result) -> Figure:
    """Draw from the cost table what a token costs in a prompt by itself and in a batch that decodes."""
    drawn = over(recorded, now)
    fig, ax = panels(figsize=(7.5, 3.8))
    rows = [row for one in drawn for row in one.result.rows]
    contexts = sorted(distinct(rows, "context", what="table", of="decode"))
    for one in drawn:
        prompts, decodes = (one.result.frame(what="table", of=of) for of in ("prefill", "decode"))
        one.line(ax, prompts.tokens, _entries(prompts.ms / prompts.tokens), "chunks alone")
        for context, dashes in zip(contexts, DASHES, strict=False):
            mine = decodes[decodes.context == context]
            places, each = mine.requests, _entries(mine.ms / mine.requests)
            one.line(ax, places, each, "measured", linestyle=dashes, marker="s")
    ax.plot([], [], TABLE_LINE, color=COLOURS["chunks alone"], label="prompt alone, by its tokens")
    for context, dashes in zip(contexts, DASHES, strict=False):
        label = f"decodes over {context:,} tokens each, by requests"
        ax.plot([], [], "s", ls=dashes, color=COLOURS["measured"], label=label)
    ax.set(yscale="log", xlabel="tokens of the step", ylabel="ms a token")
    _ticks(ax)
    ax.set_title(_tables(drawn), fontsize=10.5)
    prompts, decodes = (drawn[0].result.frame(what="table", of=of) for of in ("prefill", "decode"))
    alone, least = decodes.ms[decodes.requests == 1].min(), (prompts.ms / prompts.tokens).min()
    fig.suptitle(f"A decode alone costs {alone / least:.0f} times a token of a large prompt", fontsize=12)
    legend(fig, ax, drawn, columns=2)
    return fig


def live_costs(recorded: Result | None, now: Result) -> Figure:
    """Live: a step by the size of its chunk, alone and beside decodes; and what pieces cost over the whole prompt."""
    drawn = over(recorded, now)
    fig, (steps, pieces) = panels(1, 2, figsize=(9, 4.6))
    configs = [one.result.parameters["batch_cost"] for one in drawn]
    contexts = sorted({context for config in configs for context in config["contexts"]})
    cases = [(0, "measured", "-"), *((c, "sarathi", d) for c, d in zip(contexts, DASHES, strict=False))]
    for one, config in zip(drawn, configs, strict=True):
        sizes = [*config["pieces"], config["prompt"]]
        whole = one.result.frame(what="live").groupby(["context", "new"]).ms.median()  # of steps with a whole piece
        for context, name, dashes in cases:
            each = [{"value": whole[context, size]} if (context, size) in whole else None for size in sizes]
            one.line(steps, sizes, each, name, linestyle=dashes, markersize=5)
        decode = np.median(one.result.frame(what="decode").ms)
        steps.axhline(decode, color=COLOURS["floor"], linestyle=":", **one.style)
        for prompt in config["table_prompts"]:
            ratios = [table_pieces(one.result.rows, prompt, piece) for piece in config["table_pieces"]]
            one.line(pieces, config["table_pieces"], _entries(ratios), "chunks alone", markersize=4)
        live = [_live_pieces(one.result, piece) for piece in config["pieces"]]
        one.line(pieces, config["pieces"], live, "measured")
    for at in PAPER.values():
        pieces.plot(list(at), list(at.values()), "|-", color=COLOURS["paper"], zorder=3)
    pieces.axhline(1, color=COLOURS["floor"], linestyle=":")
    steps.plot([], [], "o-", color=COLOURS["measured"], label="live: a chunk alone, pieces of a prompt")
    for context, name, dashes in cases[1:]:
        label = f"live: beside {configs[0]['running']} decodes over {context:,} tokens"
        steps.plot([], [], "o", ls=dashes, color=COLOURS[name], label=label)
    steps.plot([], [], ":", color=COLOURS["floor"], label="decodes alone; the whole prompt")
    steps.plot([], [], "|-", color=COLOURS["paper"], label="paper: Yi-34B, 2,047 to 16,383 tokens")
    steps.plot([], [], TABLE_LINE, color=COLOURS["chunks alone"], label=_tables(drawn))
    repeats = counted(drawn, "prefill_x", source="live", **PAST_TILE)
    steps.set_title(f"median step ({repeats} repeats)", fontsize=10.5)
    steps.set(yscale="log", xlabel="tokens of the chunk", ylabel="ms a step")
    pieces.set_title("a prompt in pieces over the whole one, 95 %", fontsize=10.5)
    pieces.set(yscale="log", xlabel="tokens of a piece", ylabel="time / that of the whole prompt")
    for ax in (steps, pieces):
        _ticks(ax)
    low, high = pieces.get_ylim()
    pieces.set_yticks([tick for tick in (0.8, 1, 1.2, 1.5, 2, 2.5, 4, 6) if low < tick < high])
    ends = [(piece, _live_pieces(drawn[0].result, piece)["value"]) for piece in sorted(configs[0]["pieces"])]
    (small, slow), (large, quick) = ends[0], ends[-1]
    told = f"{large} tokens take {quick:.2f} of a whole prompt's time, pieces of {small} take {slow:.2f}"
    fig.suptitle(f"Live, pieces of {told}", fontsize=12)
    legend(fig, steps, drawn, columns=2)
    return fig


def piece_rows(result: Result) -> Table:
    """Live, by the size of a piece: over the whole prompt, and together with decodes over one of each."""
    for piece in result.parameters["batch_cost"]["pieces"]:
        mixed = result.summary.of("mixed_x", source="live", budget_tokens=piece, than="apart")
        row = {"tokens of a piece": piece, "time / whole prompt": interval(_live_pieces(result, piece), 2)}
        yield row | {"with decodes / apart": interval(mixed, 2)}


def table_rows(result: Result) -> Table:
    """The same by the cost table, the worst of its prompts."""
    value = result.summary.value
    for piece in result.parameters["batch_cost"]["table_pieces"]:
        where = {"source": "table", "budget_tokens": piece}
        yield {
            "tokens of a piece": piece,
            "time / whole prompt, at most": f"{value('prefill_x', **where, than='whole', across='worst'):.2f}",
            "with decodes / apart": f"{value('mixed_x', **where, than='apart'):.2f}",
        }


def tile_rows(result: Result) -> Rows:
    """A token more than a tile, beside the paper's."""
    here, table = (result.summary.of("prefill_x", source=source, **PAST_TILE) for source in ("live", "table"))
    return [
        {"what": "257 tokens / 256", "paper (A100)": 1.32, "live": interval(here, 2), "table": f"{table['value']:.2f}"}
    ]


def _live_pieces(result: Result, piece: int) -> Entry:
    return result.summary.of("prefill_x", source="live", budget_tokens=piece, than="whole")


def _entries(values: Iterable[float]) -> list[Entry]:
    """Values without intervals, as entries of a summary."""
    return [{"value": value} for value in values]


def _tables(drawn: Sequence[Drawn]) -> str:
    """The cost tables of the results, those of the record first."""
    costs = [one.result.parameters["hardware"]["costs"] for one in drawn]
    return f"by the table of {', yours of '.join(dict.fromkeys(costs))}"


def _ticks(ax: Axes) -> None:
    """Tokens at powers of two."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    log_ticks(ax.yaxis)
