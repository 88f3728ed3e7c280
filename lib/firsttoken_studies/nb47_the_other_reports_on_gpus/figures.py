"""The figures and tables of notebook 47. Nothing in them is random, so that a reader's run is the record's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firsttoken_studies.nb47_the_other_reports_on_gpus.study import EACH_BLOCK, FIRST_STAGE, ONE_COPY, WHOLE
from firsttoken_studies.record.plot import COLOURS, LOOKS, Figure, panels, ticks
from firsttoken_studies.record.results import Result, Table, distinct, rows_where

_NAMES = {EACH_BLOCK: "a copy for each block, layer, K and V", ONE_COPY: "one copy each way"}


def crossing_rows(now: Result) -> Table:
    """A line a card and model: which way is the cheaper one, by kind of copies."""
    pairs = dict.fromkeys((row["card"], row["model"]) for row in rows_where(now.rows, report="CPS"))
    for card, model in pairs:
        line: dict[str, Any] = {"GPU and model": f"{card}, {model}"}
        for way, name in _NAMES.items():
            entry = now.summary.get("cheaper_way", machine=card, model=model, variant=way)
            line[name] = entry["value"] if entry else "not covered by the tables"
        yield line


def recovery_times(now: Result, cards: Sequence[str]) -> Figure:
    """Swap and recompute over the length of a request, a column a card, a row a model."""
    models = distinct(now.rows, "model", report="CPS")
    size = (2.7 * len(cards) + 0.9, 2.1 * len(models) + 1.2)
    fig, axes = panels(len(models), len(cards), figsize=size, sharex=True, sharey="row", squeeze=False)
    for line, model in zip(axes, models, strict=True):
        for ax, card in zip(line, cards, strict=True):
            of_model = [row for row in rows_where(now.rows, card=card, model=model) if "way" in row]
            curves = (
                ("recompute_s", EACH_BLOCK, "recompute"),
                ("swap_s", EACH_BLOCK, "swap"),
                ("swap_s", ONE_COPY, "coalesced"),
            )
            for key, way, name in curves:
                rows, look = rows_where(of_model, way=way), LOOKS[name]
                times = [1e3 * row[key] for row in rows]
                ax.plot([row["tokens"] for row in rows], times, color=look.colour, marker=look.marker, ms=4)
            if not of_model:
                ax.text(0.5, 0.5, "not covered\nby the tables", ha="center", transform=ax.transAxes, fontsize="small")
            ax.set(xscale="log", yscale="log", title=f"{card}\n{model}")
            ax.title.set_fontsize("small")
            ax.xaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_major_formatter("{x:g}")
        line[0].set_ylabel("milliseconds")
    for ax in axes[-1]:
        ax.set_xlabel("tokens of the request")
    labels = {"recompute": "recompute", "swap": f"swap, {_NAMES[EACH_BLOCK]}", "coalesced": f"swap, {_NAMES[ONE_COPY]}"}
    for name, label in labels.items():
        axes[0][0].plot([], [], color=LOOKS[name].colour, marker=LOOKS[name].marker, ms=4, label=label)
    fig.legend(loc="outside lower center", ncols=3, fontsize="small")
    fig.suptitle(_recovery_message(now))
    return fig


def _recovery_message(now: Result) -> str:
    """Say by kind of copies on how many pairs of GPU and model recomputing ever pays."""
    sentences = []
    for way, name in ((ONE_COPY, "in one copy"), (EACH_BLOCK, "block by block")):
        crossings = [entry["value"] for entry in now.summary.all("cheaper_way", variant=way)]
        pays = sum(value != "swap always" for value in crossings)
        sentences.append(f"{pays} of {len(crossings)} {name}")
    return f"Pairs of GPU and model on which computing again ever pays: {sentences[0]}, {sentences[1]}"


def speedups(now: Result) -> Figure:
    """Draw the speed-up of the first token over the rate of the link, a panel a model and card."""
    import matplotlib

    rows = rows_where(now.rows, report="DroidSpeak")
    cases = list(dict.fromkeys((row["model"], row["gpus"], row["card"]) for row in rows))
    fig, axes = panels(1, len(cases), figsize=(3.1 * len(cases) + 0.8, 3.8), sharey=True, squeeze=False)
    shades = matplotlib.colormaps["viridis"]
    lengths = distinct(rows, "tokens")
    for ax, (model, gpus, card) in zip(axes[0], cases, strict=True):
        ax.axhspan(1.7, 3.1, color=COLOURS["paper"], alpha=0.25, lw=0)
        ax.axhline(1, color=COLOURS["floor"], lw=1, ls=":")
        for group_index, tokens in enumerate(lengths):
            of_length = rows_where(rows, model=model, card=card, tokens=tokens)
            gained = [row["own_s"] / max(row["group_s"], row["loading_s"]) for row in of_length]
            colour = shades(0.85 * group_index / max(1, len(lengths) - 1))
            ax.plot(
                [row["link"] for row in of_length], gained, marker="o", ms=4, color=colour, label=f"{tokens:,} tokens"
            )
        ax.set(xscale="log", xlabel="rate of the link, Gbit/s", title=f"{model} on {gpus} {card}")
        ax.title.set_fontsize("small")
        links = distinct(rows, "link")
        ticks(ax.xaxis, links, fontsize="small")
    axes[0][0].set_ylabel("first token, times earlier")
    axes[0][0].fill_between([], [], color=COLOURS["paper"], alpha=0.25, label="the paper: 1.7 to 3.1 times")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    fig.suptitle("The faster the GPU, the faster the link that another model's cache must come over")
    return fig


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
