"""Why one contiguous group: the error by the number of transitions, equally many layers (DroidSpeak, Figure 10)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from firsttoken.assets.needs import LAYERS, Need
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import spans
from firsttoken.droidspeak.profile.layer_profiler import LayerProfiler, Questions
from firsttoken.droidspeak.profile.pareto import Profiled, frontier, smallest_within
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.droidspeak import tables
from firsttoken_studies.droidspeak.published import FIGURE_10_CRITICAL, FIGURE_10_GROUP, FIGURE_11_LAYERS, PAPER_DEPTH
from firsttoken_studies.droidspeak.setting import ITEMS, Setting, batches
from firsttoken_studies.droidspeak.styles import METHODS, in_words
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, profiled_groups
from firsttoken_studies.nb30_full_reuse_and_sensitivity.sensitivity import RECOMPUTED, REUSED
from firsttoken_studies.record.overlay import DrawnResult, legend, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, frame_of


@dataclass(frozen=True)
class TransitionsConfig:
    """``layers`` are recomputed in each of ``transitions`` numbers of contiguous runs, ``draws`` random sets of each.

    ``items`` held-out items of the first ``runs`` runs of the profile are answered over each set.
    """

    layers: int
    transitions: tuple[int, ...]
    draws: int
    items: int
    runs: int

    def needs(self) -> list[Need]:
        """Between the runs of recomputed layers lie reused ones; there are as many items as are answered."""
        most = max(self.transitions)
        return [
            Need("transitions.layers (and a reused one between two runs)", self.layers + most - 1, LAYERS),
            Need("transitions.items", self.items, ITEMS),
        ]


def transitions(profile: Profile) -> Outcome:
    """One row a run and set of layers: distance of the output from the receiver's own, likelihood and accuracy lost."""
    config = profile.section("transitions", TransitionsConfig)
    setting = Setting(profile, config.needs())
    rows = []
    for run in setting.runs[: config.runs]:
        receiver, sender = setting.pair(run)
        items = setting.items(run, receiver.tokenizer)[0][: config.items]
        depth = receiver.model.config.num_hidden_layers
        sets = list(layer_sets(depth, config, setting.seed))
        sums = {layers: [0.0, 0.0, 0.0] for _, layers in sets}
        own_totals = [0.0, 0.0]
        parts = list(batches(items, setting.config.batch))
        for part in track(parts, desc=f"transitions {run.name}", unit="batch"):
            questions = Questions.of([item.tokens for item in part], receiver.model.device)
            profiler = LayerProfiler(sender.model, receiver.model, questions, range(depth))
            reference = profiler.prefill()
            own_totals = [own_totals[0] + reference.nll.sum().item(), own_totals[1] + reference.accuracy.sum().item()]
            for _, layers in sets:
                score = profiler.scattered(layers)
                for index, values in enumerate((score.deviation, score.nll, score.accuracy)):
                    sums[layers][index] += values.sum().item()
        n = len(items)
        for count, layers in sets:
            deviation, nll, accuracy = (value / n for value in sums[layers])
            rows.append(
                run.row()
                | {"transitions": count, "layers": ",".join(map(str, layers)), "n": n, "seed": setting.seed}
                | {"deviation": round(deviation, 5), "nll_lost": round(nll - own_totals[0] / n, 5)}
                | {"accuracy_lost": round(own_totals[1] / n - accuracy, 5)}
            )
    return Outcome(rows, provenance={"models": setting.models.provenance})


def transitions_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by number of transitions the distance over the sets of layers, for each run and for all together."""
    summary, frame = Summary(), frame_of(rows)
    made = {"deviation": ("deviation", "mean", "of the output's length")}
    summary.by(frame, {key: key for key in ("receiver", "sender", "task", "transitions")}, made)
    summary.by(frame, {"transitions": "transitions"}, made, across="mean")
    return summary


def layer_sets(depth: int, config: TransitionsConfig, seed: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(transitions, layers): different random sets, uniform over those with that many contiguous runs.

    There are fewer where no more different ones were found in a hundred times as many draws. Raises ProfileError for
    a number of runs that so many layers cannot be in.
    """
    rng, most = random.Random(seed), min(config.layers, depth - config.layers + 1)
    for count in config.transitions:
        if not 1 <= count <= most:
            raise ProfileError(
                f"transitions: {config.layers} of {depth} layers lie in 1 to {most} contiguous runs, not in {count}"
                if most > 0
                else f"transitions: {config.layers} layers do not fit {depth}; give 1 to {depth}"
            )
    for count in config.transitions:
        chosen_sets: set[tuple[int, ...]] = set()
        for _ in range(100 * config.draws):
            if len(chosen_sets) == config.draws:
                break
            layers_drawn = _runs(depth, config.layers, count, rng)
            if layers_drawn not in chosen_sets:
                chosen_sets.add(layers_drawn)
                yield count, layers_drawn


def _runs(depth: int, layers: int, count: int, rng: random.Random) -> tuple[int, ...]:
    """``layers`` of ``depth`` in exactly ``count`` runs: compositions of the recomputed and of the reused layers."""
    lengths = _parts(layers, count, rng)
    gaps = [gap - 1 for gap in _parts(depth - layers - (count - 1) + count + 1, count + 1, rng)]
    layers_chosen: list[int] = []
    layer = gaps[0]
    for i, length in enumerate(lengths):
        layers_chosen += range(layer, layer + length)
        layer += length + gaps[i + 1] + 1  # at least one reused layer between two runs
    assert len(spans(layers_chosen)) == count
    return tuple(layers_chosen)


def _parts(total: int, count: int, rng: random.Random) -> list[int]:
    """``total`` as a sum of ``count`` numbers of at least 1, every such sum equally likely."""
    cuts = [0, *sorted(rng.sample(range(1, total), count - 1)), total]
    return [b - a for a, b in pairwise(cuts)]


# The figures of notebook 31, drawn from results alone.


def transition_errors(recorded: Result | None, now: Result) -> Figure:
    """Figure 10: the error by the number of contiguous runs that equally many recomputed layers lie in."""
    results = over(recorded, now)
    runs = tables.by_run(results[0].result)
    fig, axes = panels(len(runs), 3, figsize=(9, 3 * len(runs) + 0.9), squeeze=False)
    columns = {
        "deviation": ("output moved, % of its length", 100),
        "nll_lost": ("likelihood lost, nats a token", 1),
        "accuracy_lost": ("token accuracy lost, points", 100),
    }
    for line, (run, first) in zip(axes, runs.items(), strict=True):
        counts = sorted({row["transitions"] for row in first})
        for ax, (column, (label, scale)) in zip(line, columns.items(), strict=True):
            for shown in results:
                rows = tables.by_run(shown.result).get(run, [])
                for position, count in enumerate(counts):
                    values = [scale * row[column] for row in rows if row["transitions"] == count]
                    if values:
                        spread = position + shown.shift + np.linspace(-0.06, 0.06, len(values))
                        ax.plot(spread, values, "o", color=COLOURS["single"], markersize=3.5, **shown.style)
                        shown.point(ax, position + shown.shift, bootstrap(values).summary(), "measured")
            ax.set_xticks(range(len(counts)), [str(count) for count in counts])
            ax.set(xlabel="contiguous runs of layers", ylabel=label, xlim=(-0.5, len(counts) - 0.5))
        layers = len(first[0]["layers"].split(","))
        line[1].set_title(f"{in_words(run)}, {layers} layers recomputed, {first[0]['n']} items", fontsize=10)
    axes[0][0].plot([], [], "o", color=COLOURS["single"], markersize=4, label="one random set of layers")
    axes[0][0].plot([], [], "o", color=COLOURS["measured"], label="mean of the sets, 95 %")
    fig.suptitle("With equally many layers recomputed, one contiguous run costs the least", fontsize=12)
    legend(fig, axes[0][0], results, "deviation", columns=2)
    return fig


def contiguous_groups(recorded: Result | None, now: Result) -> Figure:
    """Figure 11: every contiguous group's loss by the layers it recomputes, and the Pareto frontier, in the runs that
    full reuse takes out of the bound."""
    results = over(recorded, now)
    runs, look = tables.losing_runs(results[0].result), METHODS["DroidSpeak"]
    fig, axes = panels(1, len(runs), figsize=(9, 4.9), sharey=True, squeeze=False)
    for ax, (run, rows) in zip(axes[0], runs.items(), strict=True):
        for shown in results:
            if groups := tables.by_run(shown.result).get(run):
                _groups_of(ax, groups, shown)
        ax.axhline(100 * BOUND, color=COLOURS["target"], linestyle="--", linewidth=1.4)
        paper = 100 * FIGURE_11_LAYERS / PAPER_DEPTH
        ax.plot(paper, 100 * BOUND, "D", color=COLOURS["paper"], markersize=9, markeredgecolor="black", zorder=3)
        ax.plot(100, 0, METHODS["full prefill"].marker, color=METHODS["full prefill"].colour, markersize=7)
        chosen, depth = smallest_within(profiled_groups(rows), BOUND), tables.depth_of(rows)
        caption = f"{chosen.group}: {len(chosen.group)} of {depth} layers, n = {rows[0]['n']}"
        ax.set_title(f"{in_words(run)}\n{caption}", fontsize=9)
        ax.set_xlim(-4, 104)
    ax = axes[0][0]
    ax.plot([], [], ".", color=COLOURS["single"], label="a contiguous group")
    ax.plot([], [], "-", color=RECOMPUTED, label="Pareto frontier")
    ax.plot([], [], look.marker, color=RECOMPUTED, markersize=9, label="fewest layers within the bound")
    for method in ("full reuse", "full prefill"):
        style = METHODS[method]
        ax.plot([], [], style.marker, color=style.colour, markersize=7, label=style.label)
    ax.plot([], [], color=COLOURS["target"], linestyle="--", label="bound: 5 % of its own score")
    ax.plot([], [], "D", color=COLOURS["paper"], markeredgecolor="black", label="paper: 11 of 32 layers within it")
    axes[0][len(runs) // 2].set_xlabel("layers recomputed, % of all")
    ax.set_ylabel("token accuracy lost, % of its own score")
    fig.suptitle("By token accuracy, one group of half of the layers or fewer keeps the loss within 5 %", fontsize=12)
    legend(fig, ax, results)
    return fig


def _groups_of(ax: Axes, rows: Rows, shown: DrawnResult) -> None:
    """Every group of a run, the frontier over them, and the one that is chosen."""
    groups, look, depth = profiled_groups(rows), METHODS["DroidSpeak"], tables.depth_of(rows)
    edge = {"markeredgecolor": "black"} if shown.own else {}

    def draw(profiled_groups: Sequence[Profiled], style: str, colour: str, **more: Any) -> None:
        share = [100 * len(g.group) / depth for g in profiled_groups]
        ax.plot(share, [100 * g.relative_loss for g in profiled_groups], style, color=colour, **(shown.style | more))

    style, size = ("o", 4) if shown.own else (".", 7)
    draw(groups, style, COLOURS["single"], markersize=size, markeredgewidth=0.5, **edge)
    draw(frontier(groups), "-", look.colour)
    draw([smallest_within(groups, BOUND)], look.marker, look.colour, markersize=9, **edge)
    draw([g for g in groups if not len(g.group)], METHODS["full reuse"].marker, REUSED, markersize=8, **edge)


def chosen_groups(recorded: Result | None, now: Result) -> Figure:
    """The group that token accuracy chooses in every run over the depth of the model, beside the paper's."""
    results = over(recorded, now)
    runs = tables.by_run(results[0].result)
    fig, ax = panels(figsize=(9, 0.5 * (len(runs) + 1) + 1.9))
    for position, run in enumerate(runs):
        for shown in results:
            if rows := tables.by_run(shown.result).get(run):
                depth, group = tables.depth_of(rows), smallest_within(profiled_groups(rows), BOUND)
                _depth_bar(ax, position + shown.shift, group.group, tables.critical_of(rows), depth, RECOMPUTED, shown)
                label = f"{group.group}: {len(group.group)} of {depth}" if len(group.group) else "none is needed"
                label += "" if shown.alone or not shown.own else " (yours)"
                ax.annotate(label, (101, position + shown.shift), va="center", annotation_clip=False, fontsize=8.5)
    low, high = FIGURE_10_GROUP
    paper, last = Group(low, high + 1), len(runs)
    _depth_bar(
        ax, last, paper, FIGURE_10_CRITICAL, PAPER_DEPTH, COLOURS["paper"], DrawnResult(now, own=True, alone=True)
    )
    paper_label = f"{paper}: {len(paper)} of {PAPER_DEPTH}"
    ax.annotate(paper_label, (101, last), va="center", annotation_clip=False, fontsize=8.5)
    ax.set_yticks(range(last + 1), [*map(in_words, runs), "paper, Figure 10"], fontsize=9)
    ax.set(xlim=(0, 100), ylim=(last + 0.6, -0.6), xlabel="depth, % of the layers")
    ax.grid(axis="y", visible=False)
    ax.barh(0, 0, color=RECOMPUTED, label="recomputed: token accuracy within 5 %")
    ax.barh(0, 0, color=COLOURS["paper"], label="recomputed in the paper")
    ax.plot([], [], "s", color=REUSED, markeredgecolor="black", markersize=6, label="critical by itself (10 % rule)")
    fig.suptitle("Token accuracy chooses a block in the middle for questions, nothing for copying", fontsize=12)
    legend(fig, ax, results)
    return fig


def _depth_bar(
    ax: Axes, position: float, group: Group, critical: Sequence[int], depth: int, colour: str, shown: DrawnResult
) -> None:
    """A group of ``depth`` layers as a bar, and each of the ``critical`` ones as a square in its middle."""
    height = 0.6 if shown.alone else 0.28
    ax.barh(position, 100, color=COLOURS["other"], alpha=0.25, height=height)
    edge = "black" if shown.own and not shown.alone else colour
    ax.barh(position, 100 * len(group) / depth, left=100 * group.lo / depth, color=colour, height=height,
            edgecolor=edge, **shown.style)  # fmt: skip
    middles = [100 * (layer + 0.5) / depth for layer in critical]
    ax.plot(middles, [position] * len(middles), "s", color=REUSED, markeredgecolor="black", markersize=5, zorder=5)
