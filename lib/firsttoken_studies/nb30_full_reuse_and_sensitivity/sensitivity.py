"""The figures of notebook 30, drawn from results and recipes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from firsttoken.droidspeak.forward import cache_of
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.study.profile import Profile
from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak import tables
from firsttoken_studies.droidspeak.answer_decoding import greedy
from firsttoken_studies.droidspeak.constructed_tasks import task_of
from firsttoken_studies.droidspeak.published import FIGURE_8_LAYER, PAPER_DEPTH
from firsttoken_studies.droidspeak.setting import Run, Setting
from firsttoken_studies.droidspeak.styles import METHODS, in_words
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import critical_of
from firsttoken_studies.record.overlay import DrawnResult, legend, over
from firsttoken_studies.record.plot import COLOURS, Figure, categories, panels
from firsttoken_studies.record.results import Result, Rows
from firsttoken_studies.record.schematic import Schematic

# One item of each task, as a reader meets it, with what a receiver says over its own cache and over another's.

SHOWN = 90  # characters of either end of a prompt


@torch.inference_mode()
def example_rows(profile: Profile, runs: Sequence[str]) -> Rows:
    """A row a pair and task, as ``Run.parse`` reads it: both ends of its first item's prompt, the expected answer, and
    both given ones.

    The items are those that the profile's own runs judge with. Raises as ``Setting`` and its methods.
    """
    setting, rows = Setting(profile), []
    for run in map(Run.parse, runs):
        receiver, sender = setting.pair(run)
        _, (item, *_) = setting.items(run, receiver.tokenizer)
        prefix, task = Prefix.of([item.prefix], receiver.model.device), task_of(item.item)
        prompt = item.item.prefix + item.item.suffix
        row = {
            "pair and task": run.name,
            "prompt": f"{prompt[:SHOWN]} ... {prompt[-SHOWN:]}",
            "expected": item.item.answers[0],
        }
        for how, variant in (("over its own cache", receiver), ("over the sender's", sender)):
            cache = cache_of(full_prefill(variant.model, prefix).kv)
            (row[how],) = greedy(
                receiver.model, receiver.tokenizer, prefix, [item.suffix], cache, task.answer_tokens, task.stop
            )
        rows.append(row)
    return rows


REUSED, RECOMPUTED = METHODS["full reuse"].colour, METHODS["DroidSpeak"].colour


def schematic() -> Schematic:
    """Draw the cache over which the receiver answers: all of the sender's, and with one layer of the sender's."""
    alt = (
        "The receiver's cache, a box for each of twelve layers, twice. Above, full reuse: all layers hold the keys "
        "and values that the sender computed. Below, one layer holds the sender's and all others the receiver's own; "
        "each layer takes its turn, and the score says which layers mind."
    )
    sketch = Schematic(17, 6.2, alt)
    for y, title, reused in (
        (1.0, "Full reuse: every layer holds the sender's keys and values", range(12)),
        (3.9, "One layer alone, each in turn: which one costs most?", (4,)),
    ):
        sketch.text(0.2, y - 0.5, title, heading=True)
        for layer in range(12):
            sketch.box(0.2 + layer, y, str(layer), "full reuse" if layer in reused else "recompute")
    for end in (2.9, 6.5):
        sketch.arrow((4.7 + (0.3 if end > 4.7 else -0.3), 5.3), (end, 5.3))
    for y, look, text in ((1.1, "full reuse", "the sender's"), (4.0, "recompute", "the receiver's")):
        sketch.box(12.9, y, look=look, width=0.7, height=0.7)
        sketch.text(13.8, y + 0.35, text)
    return sketch


def full_reuse(
    recorded: Result | None, now: Result, decoded: Result | None = None, decoded_now: Result | None = None
) -> Figure:
    """Figure 6: what the receiver answers over its own cache and over the sender's, the sender, and what is lost.

    Above, F1 of decoded answers, the paper's metric (reuse_methods, where it was run); below, token accuracy
    (layer_profile).
    """
    shown = {"own": "full prefill", "reuse": "full reuse", "sender": "sender"}
    results = over(recorded, now)
    answers = over(decoded, decoded_now) if decoded_now else [DrawnResult(decoded, own=False)] if decoded else []
    parts = [(result_drawn, "F1 of decoded answers", _decoded(result_drawn.result, shown)) for result_drawn in answers]
    parts += [(result_drawn, "token accuracy", _accuracy(result_drawn.result, shown)) for result_drawn in results]
    lines = list(dict.fromkeys((metric, run) for _, metric, by_run in parts for run in by_run))
    fig, (scores, lost) = panels(1, 2, figsize=(9, 0.5 * len(lines) + 2.3), sharey=True, width_ratios=(1.5, 1))
    for result_drawn, metric, by_run in parts:
        for run, items in by_run.items():
            position = lines.index((metric, run)) + result_drawn.shift
            for step, (kind, method) in zip((-0.1, 0.0, 0.1), shown.items(), strict=True):
                result_drawn.point(
                    scores, position + step, bootstrap(items[kind]).summary(scale=100), LOOK[method], along="x"
                )
            share = tables.relative_loss(items["own"], items["reuse"]).summary()
            result_drawn.point(lost, position, share, LOOK["full reuse"], along="x")
    first = sum(metric != "token accuracy" for metric, _ in lines)
    lost.plot([50, 50], [-0.5, first - 0.5], color=COLOURS["paper"], linestyle="--", linewidth=2)
    lost.axvline(0, color=COLOURS["mark"], linewidth=0.8)
    for ax, label in ((scores, "score, %"), (lost, "full reuse loses, % of own score")):
        ax.set_xlabel(label)
        ax.axhline(first - 0.5, color=COLOURS["mark"], linewidth=1.6)
        ax.grid(axis="y", visible=False)
    scores.set_xlim(-2, 104)  # a marker at 100 is seen whole
    categories(scores, [in_words(run) for _, run in lines], fontsize=9)
    for text_position, metric in ((-0.35, "F1 of decoded answers"), (first - 0.3, "token accuracy, the answer given")):
        scores.annotate(metric, (101, text_position), ha="right", fontsize=8.5, style="italic")
    for method in shown.values():
        scores.plot([], [], METHODS[method].marker, color=METHODS[method].colour, label=METHODS[method].label)
    scores.plot([], [], color=COLOURS["paper"], linestyle="--", label="paper: loses more than 50 %")
    legend(fig, scores, results, "accuracy_pct", columns=4)
    most = {  # by metric, of the record
        metric: max(tables.relative_loss(items["own"], items["reuse"]).estimate for items in by_run.values())
        for _, metric, by_run in reversed(parts)
    }
    losses = " and ".join(f"{share:.0f} % of the {metric}" for metric, share in sorted(most.items()))
    fig.suptitle(f"Full reuse loses up to {losses}", fontsize=12)
    return fig


LOOK = {"full prefill": "recompute", "full reuse": "full reuse", "sender": "sender"}


def _decoded(result: Result, shown: Mapping[str, str]) -> dict[str, dict[str, list[float]]]:
    """Return by run of reuse_methods the scores of held-out items, by what is shown."""
    by_run = {}
    for run, rows in tables.by_run(result).items():
        by_method = {row["method"]: row["item_score"] for row in rows}
        by_run[run] = {kind: by_method[method] for kind, method in shown.items()}
    return by_run


def _accuracy(result: Result, shown: Mapping[str, str]) -> dict[str, dict[str, list[float]]]:
    """Return by run of layer_profile the token accuracy of items, by what is shown."""
    runs = tables.by_run(result).items()
    return {run: {kind: tables.only(rows, kind)["item_accuracy"] for kind in shown} for run, rows in runs}


def sensitivity(recorded: Result | None, now: Result) -> Figure:
    """Figure 7: what the reuse of one layer alone costs, and which layers the 10 % rule calls critical, in the runs
    that full reuse hurts."""
    results = over(recorded, now)
    runs = tables.losing_runs(results[0].result)
    fig, axes = panels(1, len(runs), figsize=(9, 4), squeeze=False, sharey=True)
    for ax, (run, first) in zip(axes[0], runs.items(), strict=True):
        for shown in results:
            rows = tables.by_run(shown.result).get(run, [])
            layers = sorted((row for row in rows if row["what"] == "layer"), key=lambda row: row["lo"])
            critical = critical_of(rows) if rows else []
            for layer, row in enumerate(layers):
                lost = tables.relative_loss(tables.only(rows, "own")["item_accuracy"], row["item_accuracy"]).summary()
                shown.point(ax, layer + shown.shift, lost, "full reuse")
                if layer in critical and not shown.repeats(ax, f"critical {layer}", lost["value"]):
                    look = METHODS["DroidSpeak"]
                    ax.plot(layer + shown.shift, lost["value"], look.marker, color=look.colour, **shown.outlined)
        ax.axhline(10, color=COLOURS["target"], linestyle="--")
        depth = tables.depth_of(first)
        ax.set_title(f"{in_words(run)}\n{len(critical_of(first))} of {depth} layers critical", fontsize=9)
    ax = axes[0][0]
    ax.plot([], [], METHODS["full reuse"].marker, color=REUSED, label="one layer reused")
    ax.plot([], [], METHODS["DroidSpeak"].marker, color=RECOMPUTED, label="critical: loses more than 10 %")
    ax.plot([], [], color=COLOURS["target"], linestyle="--", label="the paper's rule, 10 %")
    ax.set_ylim(-15, 25)  # the intervals of a few items reach far beyond
    axes[0][len(runs) // 2].set_xlabel("layer that is reused, alone (0-based)")
    ax.set_ylabel("token accuracy lost, % of its own")
    legend(fig, ax, results, "accuracy_pct")
    named = sum(len(critical_of(rows)) for rows in runs.values()) or "no"
    fig.suptitle(f"Layers whose reuse alone costs more than a tenth of the score: {named} in the record", fontsize=12)
    return fig


def item_spread(recorded: Result | None, now: Result) -> Figure:
    """Figure 8: how differently items suffer, by the layer that is reused, in the runs that full reuse hurts."""
    results = over(recorded, now)
    fig, ax = panels(figsize=(9, 4.2))
    runs = tables.losing_runs(results[0].result)
    lines = list(zip(runs, ("o-", "s--", "^:", "D-."), strict=False))
    for shown in results:
        for run, line in lines:
            if rows := tables.by_run(shown.result).get(run):
                spread = 100 * tables.layer_losses(rows).std(1)
                if not shown.repeats(ax, run, tuple(spread)):
                    ax.plot(range(len(spread)), spread, line, color=COLOURS["measured"], **shown.outlined)
    depth = len(tables.layer_losses(next(iter(runs.values()))))
    for run, line in lines:
        ax.plot([], [], line, color=COLOURS["measured"], label=in_words(run))
    layer = (FIGURE_8_LAYER - 0.5) / PAPER_DEPTH * depth - 0.5
    caption = "paper: layer 23 of 32, at its relative depth"
    ax.axvline(layer, color=COLOURS["paper"], linestyle="--", linewidth=2, label=caption)
    ax.set_xticks(range(0, depth, 2))
    ax.set(xlabel="layer that is reused, alone (0-based)", ylim=(0, None))
    ax.set_ylabel("standard deviation over items\nof token accuracy lost, points")
    legend(fig, ax, results, "accuracy_pct", columns=2)
    widest = sorted({int(tables.layer_losses(rows).std(1).argmax()) for rows in runs.values()})
    text = ", ".join(map(str, widest))
    fig.suptitle(
        f"Items differ most at layer {text} of {depth}; the paper's at {FIGURE_8_LAYER} of {PAPER_DEPTH}", fontsize=12
    )
    return fig
