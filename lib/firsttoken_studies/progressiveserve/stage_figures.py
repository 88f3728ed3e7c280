"""The figures of notebooks 11 and 12, drawn from results and recipes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.progressiveserve.quality_gates import CLOSED_BOOK, GATES, gate
from firsttoken.progressiveserve.stages import REPORT_PLAN
from firsttoken_studies.progressiveserve.layers import chosen
from firsttoken_studies.record.overlay import DrawnResult, legend, name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, log_ticks, panels
from firsttoken_studies.record.results import Result, Table, rows_where
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


KIISE = {"em_pct": (55.67, 48.22, 56.22, 55.67), "f1_pct": (66.11, 54.26, 62.02, 66.11)}
"""The authors' scores of the full model and of stages 1 to 3 in % (KIISE KSC 2025, Table 1): Llama-2-7B, TriviaQA
validation, closed book."""

DEEP = 0.5  # a block is deep that begins in the second half of the layers
NAMES = {"none": "not healed", "report": "report's recipe", "ours": "our recipe"}


def distance_map(recorded: Result | None, now: Result) -> Figure:
    """Heat map of the reader's last-token distances over start and block size: the best start of each size framed, pale
    where the record has it, and the block of the deployed size beside the report's at its relative depth."""
    import matplotlib.pyplot as plt
    import seaborn

    results = over(recorded, now)
    table = _last(now).pivot(index="size_layers", columns="start_layer", values="distance")
    fig, ax = panels(figsize=(9, 4.9))
    seaborn.heatmap(table, ax=ax, cmap="Greys", cbar_kws={"label": "angular distance (0 to 1), last token"})
    rows = {size: row for row, size in enumerate(table.index)}
    for shown in results:
        width, colour = (2, COLOURS["measured"]) if shown.own else (6, COLOURS["single"])
        for start, size in _moved(shown)[["start_layer", "size_layers"]].itertuples(index=False):
            if size in rows:
                frame = plt.Rectangle((start, rows[size]), 1, 1, fill=False, clip_on=False)
                ax.add_patch(frame)
                frame.set(edgecolor=colour, linewidth=width, **shown.style | {"alpha": 1.0})
        label = f"turns the stream least, by size: {shown.who()}"
        hollow = {"fillstyle": "none", "markeredgewidth": width / 1.5, "markersize": 8}
        ax.plot([], [], "s", color=colour, label=label, **hollow, path_effects=shown.style.get("path_effects"))
    size = len(REPORT_PLAN.block)
    if size in rows:
        scaled = REPORT_PLAN.block[0] / REPORT_PLAN.depth * table.shape[1]
        look = {"color": COLOURS["paper"], "markeredgecolor": "black", "markeredgewidth": 1.5}
        label = f"the report's block of {size}, at its relative depth"
        ax.plot(scaled + 0.5, rows[size] + 0.5, "D", markersize=11, linestyle="none", label=label, **look)
    ax.set(xlabel="first layer of the block (0-based)", ylabel="layers in the block")
    ax.tick_params(axis="both", rotation=0)
    ax.grid(False)
    start, end = now.summary.value("chosen_start"), now.summary.value("chosen_end")
    depth_text = (
        "deep, as the report has it" if now.summary.value("relative_depth") >= DEEP else "in the middle, not deep"
    )
    message = f"The block of {end - start + 1} that turns the stream least, {start}-{end}, lies {depth_text}"
    fig.suptitle(message + _instead(now))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return fig


def chosen_blocks(recorded: Result | None, now: Result) -> Figure:
    """The chosen block of every size as a bar from its first to its last layer; the report's block, scaled, beside."""
    results = over(recorded, now)
    fig, ax = panels(figsize=(8, 4.6))
    height = {1: 0.7, 2: 0.34, 3: 0.24}[len(results)]
    for shown in results:
        blocks = _moved(shown)
        look = shown.style | {"color": COLOURS["measured"], "edgecolor": "black" if shown.own else "none"}
        label = f"chosen: {shown.who()}"
        ax.barh(blocks.size_layers - shown.shift, blocks.size_layers, height, blocks.start_layer, label=label, **look)
    best = _best(now)
    depth = _depth(now)
    for start, size, distance in best[["start_layer", "size_layers", "distance"]].itertuples(index=False):
        ax.annotate(f"{distance:.2f}", (start - 0.3, size), ha="right", va="center", fontsize=9)
    scale, size = depth / REPORT_PLAN.depth, len(REPORT_PLAN.block)
    report_start, width = REPORT_PLAN.block[0] * scale, size * scale
    report_text = f"report: {REPORT_PLAN.block[0]}-{REPORT_PLAN.block[-1]} of {REPORT_PLAN.depth}, scaled to {depth}"
    ax.barh(
        [size], [width], left=[report_start], height=0.35, color=COLOURS["paper"], edgecolor="black", label=report_text
    )
    ax.set(xlabel="layer (0-based); beside a bar: the block's angular distance", ylabel="layers in the block")
    ax.set(xlim=(-1.5, depth), yticks=sorted(best.size_layers))
    deep = int((best.start_layer / depth >= DEEP).sum())
    message = f"{deep} of {len(best)} chosen blocks begin in the deeper half, where the report's lies"
    fig.suptitle(message + _instead(now))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return fig


def stage_scores(recorded: Result | None, now: Result | None) -> Figure:
    """Points of EM and F1 that each stage loses against the full model, unhealed and by recipe, with 95 % intervals;
    what the authors lost, and what the report allows."""
    results = over(recorded, now)
    fig, axes = panels(1, 2, figsize=(9, 4.6), sharey=True)
    for ax, score in zip(axes, ("em", "f1"), strict=True):
        draw_stages(ax, results, f"{score}_drop")
        for stage, limit in GATES.items():
            lost = KIISE[f"{score}_pct"][0] - KIISE[f"{score}_pct"][stage]
            authors = {"label": "authors: Llama-2-7B, TriviaQA", "color": COLOURS["paper"]} if stage == 1 else {}
            ax.plot(stage + 0.42, lost, "d", **({"color": COLOURS["paper"]} | authors), markeredgecolor="black")
            gate = {"label": "the report allows at most"} if stage == 1 else {}
            ax.plot([stage - 0.45, stage + 0.47], [limit] * 2, color=COLOURS["target"], linewidth=2.5, **gate, zorder=5)
        ax.set_title({"em": "exact match (EM)", "f1": "F1"}[score])
    name_recipes(axes[0], results)
    axes[0].set_ylabel("points lost against the full model")
    losses = {"authors": KIISE["em_pct"][0] - KIISE["em_pct"][1]}
    for kind in ("report", "ours"):
        if entry := results[0].result.summary.get("em_drop", stage=1, recipe=kind):
            losses[NAMES[kind]] = entry["value"]
    passing = [name for name, points in losses.items() if points <= GATES[1]]
    message = ", ".join(f"{points:.0f} ({name})" for name, points in losses.items())
    fig.suptitle(
        f"Within {GATES[1]:.0f} points of EM: {' and '.join(passing) or 'nobody'}. Stage 1 loses {message} points of EM"
    )
    legend(fig, axes[0], results, "em_drop")
    return fig


def draw_stages(ax: Axes, results: Sequence[DrawnResult], measure: str, **labels: str) -> None:
    """Points lost by stage, and by recipe but of the last one, with their intervals around 0: by ``measure``, of which
    a "change" is what is gained."""
    for stage in GATES:
        kinds = [{"recipe": kind} for kind in NAMES] if stage < max(GATES) else [{}]
        for offset, kind in zip(np.linspace(-0.27, 0.27, len(kinds)) if kinds[1:] else [0.0], kinds, strict=True):
            for shown in results:
                entry = shown.result.summary.get(measure, stage=stage, **labels, **kind)
                if entry and measure.endswith("change"):
                    entry = {"value": -entry["value"], "low": -entry["high"], "high": -entry["low"]}
                shown.point(ax, stage + offset + shown.shift / 3, entry, kind.get("recipe", "S3"), share=1 / 3)
    ax.axhline(0, color=COLOURS["mark"], linewidth=1)
    ax.set(xticks=list(GATES), xticklabels=[f"stage {stage}" for stage in GATES])


def name_recipes(ax: Axes, results: Sequence[DrawnResult]) -> None:
    """Make the legend of ``ax`` name the marks of :func:`draw_stages` that any of ``results`` has."""
    recipes = {entry["where"].get("recipe", "S3") for shown in results for entry in shown.result.summary}
    for name, label in (NAMES | {"S3": "whole model"}).items():
        if name not in recipes:
            continue
        ax.plot([], [], LOOKS[name].marker, color=COLOURS[name], label=label)


def control_scores(recorded: Result | None, now: Result) -> Figure:
    """F1 and perplexity of every control, healed and not, with 95 % intervals. ``now`` is a run of stage_quality: it
    has the full model and the chosen block without healing; the controls are trained for the record only."""
    labels = {
        "s0": "full model",
        "full": "full model, trained on",
        "chosen": "8 layers, chosen block",
        "one_shot": "the same, twice the steps",
        "random": "8 layers, random block",
        "drop6": "6 layers, chosen block",
        "drop4": "4 layers, chosen block",
    }
    results = over(recorded, now)
    fig, axes = panels(1, 2, figsize=(9, 4.6), sharey=True)
    for ax, score, label in zip(axes, ("f1_pct", "perplexity"), ("F1, %", "perplexity (log scale)"), strict=True):
        for shown in results:
            summary = shown.result.summary
            shown.point(ax, shown.shift, summary.get(score, stage=0), "S0", along="x")
            for position, name in enumerate(labels):
                for kind, apart in (("none", -0.16), ("ours", 0.16)):
                    entry = summary.get(score, variant=name, recipe=kind)
                    if shown.own and (name, kind) == ("chosen", "none"):
                        entry = summary.get(score, stage=1, recipe="none")
                    shown.point(ax, position + apart + shown.shift / 2, entry, kind, along="x", share=0.5)
        ax.set(xlabel=label, yticks=range(len(labels)), yticklabels=labels.values())
    for kind in ("none", "ours"):
        axes[0].plot([], [], LOOKS[kind].marker, color=COLOURS[kind], label=NAMES[kind])
    axes[0].set_xlim(0, None)
    axes[0].invert_yaxis()
    axes[1].set_xscale("log")
    log_ticks(axes[1].xaxis)
    axes[1].xaxis.set_ticks([], minor=True)
    axes[1].legend(*axes[0].get_legend_handles_labels(), loc="lower right", fontsize="small", frameon=True)
    chosen, drawn_at_random = (
        results[0].result.summary.get("perplexity", variant=name, recipe="none") for name in ("chosen", "random")
    )
    if chosen and drawn_at_random:
        than = "less" if drawn_at_random["value"] < chosen["value"] else "more"
        message = f"perplexity {drawn_at_random['value']:.0f}, not {chosen['value']:.0f}"
        fig.suptitle(f"Losing a random block costs {than} than losing the chosen one: {message}")
    name_results(fig, results, "f1_pct")
    return fig


def _last(result: Result) -> pandas.DataFrame:
    frame = result.frame()
    return frame[frame.tokens == "last"]


def _best(result: Result) -> pandas.DataFrame:
    """The row of the block that is chosen at each size."""
    import pandas

    table = [row for row in result.rows if row["tokens"] == "last"]
    return pandas.DataFrame(
        [chosen(rows_where(table, size_layers=size)) for size in sorted({*_last(result).size_layers})]
    )


def _moved(shown: DrawnResult) -> pandas.DataFrame:
    """The chosen blocks of a result; of a changed mechanism those that are others than the library's."""
    best = _best(shown.result)
    return best if shown.library is None else best[best.start_layer.to_numpy() != _best(shown.library).start_layer]


def _instead(now: Result) -> str:
    """Return what a title adds where the reader has changed the rule: the block that it chooses."""
    if now.with_mechanism is None:
        return ""
    start, end = (now.with_mechanism.summary.value(name) for name in ("chosen_start", "chosen_end"))
    return f"\nyour rule chooses {start}-{end}"


def _depth(result: Result) -> int:
    table = _last(result)
    return int((table.start_layer + table.size_layers).max())


# The tables of notebook 12: stages beside the authors' scores, gates, shares recovered.


def stage_rows(result: Result, live: Result) -> Table:
    """One row a variant: EM, F1, choices, perplexity with 95 % intervals; EM of the live run and of the authors."""
    get = result.summary.get
    for labels in _places(result):
        stage, healed = labels["stage"], labels.get("recipe") != "none"
        row = {
            "variant": _title(**labels),
            "EM, %": interval(get("em_pct", **labels)),
            "F1, %": interval(get("f1_pct", **labels)),
            "four choices, %": interval(get("choice_pct", **labels)),
            "answer, nats/token": interval(get("answer_nll", **labels), 2),
            "perplexity": interval(get("perplexity", **labels)),
            "closed-book F1, %": interval(get("f1_pct", **labels, task=CLOSED_BOOK)),
        }
        row["F1 here, now, %"] = interval(live.summary.get("f1_pct", **labels))
        row["authors' EM / F1, %"] = f"{KIISE['em_pct'][stage]} / {KIISE['f1_pct'][stage]}" if healed else ""
        yield row


def healing_rows(recipes: Mapping[str, Mapping[str, Any]]) -> Table:
    """Yield the training results of each committed adapter; ``recipes`` by adapter name ("A-ours")."""
    for name, recipe in recipes.items():
        stage, _, kind = name.partition("-")
        made, last = recipe["recipe"], [row for row in recipe["curve"] if "validation_f1" in row][-1]
        reads = made["accumulate"] * (made["batch"] + made["text_batch"])
        yield {
            "adapter": f"{stage}, {NAMES[kind]}",
            "steps": last["step"],
            "sequences read": last["step"] * reads,
            "validation F1, %": round(100 * last["validation_f1"], 1),
            "validation perplexity": round(last["validation_perplexity"], 1),
        }


def gate_rows(result: Result) -> Table:
    """The report's gates (3.1.2): points lost against the full model, the limit, what the authors lost, the verdict."""
    for labels in _places(result):
        stage = labels["stage"]
        if stage not in GATES or labels.get("recipe") == "none":
            continue
        for score in ("em", "f1"):
            drop, authors = result.summary.of(f"{score}_drop", **labels), KIISE[f"{score}_pct"]
            yield {
                "variant": _title(**labels),
                "score": score.upper(),
                "points lost": interval(drop),
                "limit": GATES[stage],
                "authors lost": round(authors[0] - authors[stage], 2),
                "gate": gate(drop, GATES[stage]),
            }


def _places(result: Result) -> list[dict[str, Any]]:
    """Stage, and recipe where it has one, of everything that was asked."""
    return [entry["where"] for entry in result.summary.all("perplexity")]


def _title(stage: int, recipe: str = "") -> str:
    name = "full model" if stage == 0 else f"stage {stage}"
    return f"{name}, {NAMES[recipe]}" if recipe else name
