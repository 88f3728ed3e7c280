"""The figures and tables of notebook 43: what a batch costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.chunked.experiments.batch_cost import PAST_TILE
from firsttoken.study.measures import Entry
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval

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
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}


def table_costs(result: Result) -> Figure:
    """By the cost table, what a token costs in a prompt by itself and in a batch that decodes."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.2))
    rows = [row for row in result.rows if row["what"] == "table"]
    prefill = [(row["tokens"], row["ms"] / row["tokens"]) for row in rows if row["of"] == "prefill"]
    ax.plot(*zip(*prefill, strict=True), "o-", color=COLOURS["chunks alone"], label="prompt alone, by its tokens")
    contexts = sorted({row["context"] for row in rows if row["of"] == "decode"})
    for context, dashes in zip(contexts, DASHES, strict=False):
        mine = [
            (r["requests"], r["ms"] / r["requests"]) for r in rows if r["of"] == "decode" and r["context"] == context
        ]
        label = f"decodes over {context:,} tokens each, by requests"
        ax.plot(*zip(*mine, strict=True), "s", ls=dashes, color=COLOURS["measured"], label=label)
    ax.set(xscale="log", yscale="log", xlabel="tokens of the step", ylabel="ms a token")
    ax.set_xscale("log", base=2)
    _plain(ax)
    ax.set_title(_table_of(result), fontsize=11)
    ax.legend(fontsize=9)
    return fig


def live_costs(result: Result) -> Figure:
    """Live: a step by the size of its chunk, alone and beside decodes; and what pieces cost over the whole prompt."""
    import matplotlib.pyplot as plt

    config = result.parameters["batch_cost"]
    fig, (steps, pieces) = plt.subplots(1, 2, figsize=(12, 4.4))
    cases = [(0, "measured", "-", "chunk alone")]
    for context, dashes in zip(config["contexts"], DASHES, strict=False):
        cases.append((context, "sarathi", dashes, f"beside {config['running']} decodes over {context:,} tokens"))
    sizes = [*config["pieces"], config["prompt"]]
    for context, name, dashes, label in cases:
        each = [_steps_ms(result, context, size) for size in sizes]
        middle = np.array([np.median(one) for one in each])
        ends = np.abs(np.array([(one.min(), one.max()) for one in each]).T - middle)
        style = {"color": COLOURS[name], "linestyle": dashes, "label": label, "capsize": 2}
        steps.errorbar(sizes, middle, ends, marker=LOOKS[name].marker or "s", markersize=5, **style)
    decode = np.median([row["ms"] for row in result.rows if row["what"] == "decode"])
    steps.axhline(decode, color=COLOURS["floor"], linestyle=":", label="decodes alone")
    steps.set_title("live, this model: median step, lines from the least to the most", fontsize=11)
    steps.set(yscale="log", xlabel="tokens of the chunk", ylabel="ms a step")
    steps.legend(fontsize=9, **BELOW)
    for tokens, at in PAPER.items():
        pieces.plot(list(at), list(at.values()), "|-", color=COLOURS["paper"], label=f"paper, {tokens:,} tokens")
    for prompt in config["table_prompts"]:
        over = [_table_pieces(result, prompt, piece) for piece in config["table_pieces"]]
        pieces.plot(config["table_pieces"], over, "s-", color=COLOURS["chunks alone"], markersize=4)
    found = [_live_pieces(result, piece) for piece in config["pieces"]]
    values = np.array([(entry["value"], entry["low"], entry["high"]) for entry in found]).T
    ends = np.abs(values[1:] - values[0])
    live = {"color": COLOURS["measured"], "marker": "o", "capsize": 2}
    pieces.errorbar(config["pieces"], values[0], ends, label=f"live, {config['prompt']:,} tokens", **live)
    pieces.axhline(1, color=COLOURS["floor"], linestyle=":")
    pieces.set_title("a prompt in pieces over the whole one", fontsize=11)
    pieces.set(xlabel="tokens of a piece", ylabel="time / that of the whole prompt")
    handles = {label: handle for handle, label in zip(*pieces.get_legend_handles_labels(), strict=True)}
    told = {"paper, Yi-34B, 2,047 to 16,383 tokens": next(iter(handles.values()))}
    told[_table_of(result)] = pieces.lines[len(PAPER)]
    told |= {label: handle for label, handle in handles.items() if label.startswith("live")}
    pieces.legend(list(told.values()), list(told), fontsize=9, **BELOW)
    for ax in (steps, pieces):
        ax.set_xscale("log", base=2)
        _plain(ax)
    return fig


def piece_rows(result: Result) -> Rows:
    """Live, by the size of a piece: over the whole prompt, and together with decodes over one of each."""
    return [
        {
            "tokens of a piece": piece,
            "time / whole prompt": interval(_live_pieces(result, piece), 2),
            "with decodes / apart": interval(
                result.summary.of("mixed_x", source="live", budget_tokens=piece, than="apart"), 2
            ),
        }
        for piece in result.parameters["batch_cost"]["pieces"]
    ]


def table_rows(result: Result) -> Rows:
    """The same by the cost table, the worst of its prompts."""
    value = result.summary.value
    return [
        {
            "tokens of a piece": piece,
            "time / whole prompt, at most": f"{value('prefill_x', **where, than='whole', across='worst'):.2f}",
            "with decodes / apart": f"{value('mixed_x', **where, than='apart'):.2f}",
        }
        for piece in result.parameters["batch_cost"]["table_pieces"]
        for where in ({"source": "table", "budget_tokens": piece},)
    ]


def tile_rows(result: Result) -> Rows:
    """A token more than a tile, beside the paper's."""
    here, table = (result.summary.of("prefill_x", source=source, **PAST_TILE) for source in ("live", "table"))
    return [
        {"what": "257 tokens / 256", "paper (A100)": 1.32, "live": interval(here, 2), "table": f"{table['value']:.2f}"}
    ]


def _live_pieces(result: Result, piece: int) -> Entry:
    return result.summary.of("prefill_x", source="live", budget_tokens=piece, than="whole")


def _steps_ms(result: Result, context: int, size: int) -> np.ndarray:
    """Of the steps that took a whole piece; of a prompt's last piece less may be left."""
    rows = (row for row in result.rows if row["what"] == "live" and row["context"] == context and row["new"] == size)
    return np.array([row["ms"] for row in rows])


def _table_pieces(result: Result, prompt: int, piece: int) -> float:
    table = (row for row in result.rows if row["what"] == "table" and row["of"] == "pieces")
    ms = {(row["prompt"], row["piece"]): row["ms"] for row in table}
    return ms[prompt, piece] / ms[prompt, prompt]


def _table_of(result: Result) -> str:
    return f"by the table of {result.parameters['hardware']['costs']}"


def _plain(ax: Axes) -> None:
    from matplotlib.ticker import LogLocator

    if ax.get_yscale() == "log":
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_formatter("")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_formatter("{x:g}")
