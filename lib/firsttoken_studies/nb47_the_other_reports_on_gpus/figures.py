"""The figures and tables of notebook 47. Nothing in them is random, so that a reader's run is the record's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firsttoken_studies.nb47_the_other_reports_on_gpus.study import EACH_BLOCK, FIRST_STAGE, ONE_COPY, WHOLE
from firsttoken_studies.record.overlay import DrawnResult, legend, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, Axes, Figure, panels, ticks
from firsttoken_studies.record.results import Result, Table, distinct, rows_where
from firsttoken_studies.record.schematic import Schematic

_NAMES = {EACH_BLOCK: "a copy for each block, layer, K and V", ONE_COPY: "one copy each way"}
_CURVES = (
    ("recompute_s", EACH_BLOCK, "recompute", "recompute"),
    ("swap_s", EACH_BLOCK, "swap", f"swap, {_NAMES[EACH_BLOCK]}"),
    ("swap_s", ONE_COPY, "coalesced", f"swap, {_NAMES[ONE_COPY]}"),
)


def schematic() -> Schematic:
    """Draw that a faster card shortens a recomputation and no copy."""
    alt = (
        "The cache of a preempted request comes back in one of two ways: its tokens are computed again, or its blocks "
        "are copied out and back, many small copies one after the other. On a faster card computing takes less time "
        "and a copy as long as before. So the way that is cheaper on one card is the dearer one on another."
    )
    sketch = Schematic(22, 6.9, alt)
    sketch.text(0.2, 0.5, "A faster card computes faster; a copy costs what it cost before", heading=True)
    for y, card, width, cheaper in ((1.3, "older card", 14.5, "copy"), (4.2, "newer card", 5.5, "compute again")):
        sketch.text(0.2, y + 1.1, card)
        sketch.box(3.4, y, "compute again", "recompute", width=width)
        for copy in range(12):
            sketch.box(3.4 + 0.8 * copy, y + 1.2, "", "swap", width=0.8)
        sketch.text(13.3, y + 1.7, "copy, block by block")
        sketch.text(21.8, y + 0.5, f"cheaper: {cheaper}", align="right")
    return sketch


def crossing_rows(now: Result) -> Table:
    """A line a card and model: which way is the cheaper one, by kind of copies."""
    pairs = dict.fromkeys((row["card"], row["model"]) for row in rows_where(now.rows, report="CPS"))
    for card, model in pairs:
        line: dict[str, Any] = {"GPU and model": f"{card}, {model}"}
        for way, name in _NAMES.items():
            entry = now.summary.get("cheaper_way", machine=card, model=model, variant=way)
            line[name] = entry["value"] if entry else "not covered by the tables"
        yield line


def recovery_times(recorded: Result | None, now: Result, cards: Sequence[str] = ()) -> Figure:
    """Swap and recompute over the length of a request, a column a card (those of the run), a row a model."""
    results, models = over(recorded, now), distinct(now.rows, "model", report="CPS")
    cards = cards or distinct(now.rows, "card", report="CPS")
    size = (2.7 * len(cards) + 0.9, 2.1 * len(models) + 1.4)
    fig, axes = panels(len(models), len(cards), figsize=size, sharex=True, sharey="row", squeeze=False)
    for line, model in zip(axes, models, strict=True):
        for ax, card in zip(line, cards, strict=True):
            for shown in results:
                _both_ways(ax, shown, card, model)
            if not ax.lines:
                ax.text(0.5, 0.5, "not covered\nby the tables", ha="center", transform=ax.transAxes, fontsize="small")
            ax.set(xscale="log", yscale="log", title=f"{card}\n{model}")
            ax.title.set_fontsize("small")
            ax.xaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_major_formatter("{x:g}")
        line[0].set_ylabel("milliseconds")
    for ax in axes[-1]:
        ax.set_xlabel("tokens of the request")
    for _, _, name, label in _CURVES:
        axes[0][0].plot([], [], color=LOOKS[name].colour, marker=LOOKS[name].marker, ms=4, label=label)
    fig.suptitle(_recovery_message(now))
    legend(fig, axes[0][0], results, size="small")
    return fig


def _both_ways(ax: Axes, shown: DrawnResult, card: str, model: str) -> None:
    for key, way, name, _ in _CURVES:
        rows = rows_where(shown.result.rows, card=card, model=model, way=way)
        if rows:
            entries = [{"value": 1e3 * row[key]} for row in rows]
            shown.line(ax, [row["tokens"] for row in rows], entries, name, ms=4)


def _recovery_message(now: Result) -> str:
    """Say by kind of copies on how many pairs of GPU and model recomputing is the cheaper way at some length."""
    sentences = []
    for way, name in ((ONE_COPY, "in one copy"), (EACH_BLOCK, "block by block")):
        crossings = [entry["value"] for entry in now.summary.all("cheaper_way", variant=way)]
        cheaper = sum(value != "swap always" for value in crossings)
        sentences.append(f"{cheaper} of {len(crossings)} {name}")
    return f"Pairs of GPU and model on which computing again is ever cheaper: {sentences[0]}, {sentences[1]}"


def speedups(recorded: Result | None, now: Result) -> Figure:
    """Draw the speed-up of the first token over the rate of the link, a panel a model and card."""
    import matplotlib

    results, rows = over(recorded, now), rows_where(now.rows, report="DroidSpeak")
    cases = list(dict.fromkeys((row["model"], row["gpus"], row["card"]) for row in rows))
    fig, axes = panels(1, len(cases), figsize=(3.1 * len(cases) + 0.8, 4.1), sharey=True, squeeze=False)
    shades = matplotlib.colormaps["viridis"]
    lengths, links = distinct(rows, "tokens"), distinct(rows, "link")
    for ax, (model, gpus, card) in zip(axes[0], cases, strict=True):
        ax.axhspan(1.7, 3.1, color=COLOURS["paper"], alpha=0.25, lw=0)
        ax.axhline(1, color=COLOURS["floor"], lw=1, ls=":")
        for length_index, tokens in enumerate(lengths):
            colour = shades(0.85 * length_index / max(1, len(lengths) - 1))
            labels = {"machine": card, "model": model, "context_tokens": tokens}
            for shown in results:
                entries = [shown.result.summary.get("speedup_x", **labels, gbit_per_s=link) for link in links]
                shown.line(ax, links, entries, "measured", color=colour, ms=4)
            ax.plot([], [], marker="o", ms=4, color=colour, label=f"{tokens:,} tokens")
        ax.set(xscale="log", xlabel="rate of the link, Gbit/s", title=f"{model} on {gpus} {card}")
        ax.title.set_fontsize("small")
        ticks(ax.xaxis, links, fontsize="small")
    axes[0][0].set_ylabel("first token, times earlier")
    axes[0][0].fill_between([], [], color=COLOURS["paper"], alpha=0.25, label="the paper: 1.7 to 3.1 times")
    fig.suptitle(_speedup_message(now, [(model, card) for model, _, card in cases], lengths[-1]))
    legend(fig, axes[0][0], results, columns=4, size="small")
    return fig


def _speedup_message(now: Result, cases: Sequence[tuple[str, str]], tokens: int) -> str:
    """Say by model and card over which rates of the link the first token of the longest prompt comes earlier."""
    earlier = []
    for model, card in cases:
        entries = now.summary.all("speedup_x", machine=card, model=model, context_tokens=tokens)
        rates = [entry["where"]["gbit_per_s"] for entry in entries if entry["value"] > 1]
        earlier.append(f"from {min(rates):g}" if rates else "never")
    return f"Gbit/s at which the first token of {tokens:,} tokens comes earlier: {', '.join(earlier)}"


def chain_rows(now: Result) -> Table:
    """A line a card and network: steps a second by measured operators, and the paper's."""
    from firsttoken_studies.petals.chain_costs import PUBLISHED_STEPS_PER_S

    for row in rows_where(now.rows, report="PETALS"):
        yield {
            "servers and network": f"three {row['card']}, {row['network']}",
            "steps/s by operators": f"{1 / row['step_s']:.2f}",
            "the paper, A100": f"{PUBLISHED_STEPS_PER_S[row['network']]:g}",
            "computing, ms a step": f"{1e3 * row['computing_s']:.0f}",
            "the paper's servers, ms": f"{1e3 * row['published_computing_s']:.0f}",
        }


def cold_rows(now: Result) -> Table:
    """A line a card and link: the first token of the whole model and of the first stage, and the prefill's share."""
    for entry in now.summary.all("ttft_below_pct", variant=FIRST_STAGE, than=WHOLE):
        labels = {key: entry["where"][key] for key in ("machine", "model", "gbit_per_s")}
        seconds = [now.summary.value("ttft_s", **labels, variant=stage) for stage in (WHOLE, FIRST_STAGE)]
        share = now.summary.value("prefill_share_pct", **labels, variant=WHOLE)
        yield {
            "GPU and link": f"{labels['machine']}, {labels['gbit_per_s']:g} Gbit/s",
            "whole model, s": f"{seconds[0]:.2f}",
            "first stage, s": f"{seconds[1]:.2f}",
            "earlier by": f"{entry['value']:.1f} %",
            "prefill, of the whole": f"{share:.1f} %",
        }
