"""A group chosen by the profile of one task, used on another task of the same pair (DroidSpeak, Figure 17)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from firsttoken.droidspeak.profile.pareto import Profiled, smallest_within
from firsttoken.droidspeak.profile.profile_transfer import (
    Chooser,
    Judge,
    best_of_size,
    item_losses,
    resampled,
    transfer,
)
from firsttoken.study.profile import Profile
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Scalar, Summary
from firsttoken_studies.droidspeak.setting import Setting, rows_by_run
from firsttoken_studies.droidspeak.styles import METHODS
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, profiled_groups, run_profile
from firsttoken_studies.record.overlay import DrawnResult, name_results, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, categories, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of, load_result, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

SEEN = "the same items"  # in place of a task's name: the choice was made on the very items that judge it
OWN = "own choice"  # of the task that judges, made on other items of it
AT_BOUND, OF_SIZE = "at the bound", "of a size"
_DRAWS = 20  # random halvings; an item judges one choice in each
_RESAMPLES = 100
_SHARES = (4, 2, 1)  # samples of a quarter, half and all of the items: 32, 64, 128

Profiles = dict[str, Sequence[Profiled]]  # by task
Pairs = dict[tuple[str, str], Profiles]  # by receiver and sender
BoundedChoice: TypeAlias = Callable[[Sequence[Profiled], float], Profiled]


def profile_transfer(
    profile: Profile, *, choose: BoundedChoice = smallest_within, judge: Judge = item_losses
) -> Outcome:
    """Rows of two kinds: ``what`` is transfer (a choice made on ``chosen_on``, judged on ``judged_on``) or choice.

    Tasks of one pair choose among the groups that were profiled on all of them.

    A transfer has the loss of every item, the mean over the choices it judged; ``rule`` is "at the bound" (the fewest
    layers that lose at most 5 %) or "of a size" (the best group of ``layers`` layers, so that foreign and own choice
    compute equally much). A choice has the ``group`` that a sample of ``items`` made, and its loss on the others.

    ``choose`` makes the choice at the bound and ``judge`` says what items lose over it. Where a reader's is another
    than the library's, and the profile has one task of each pair, its transfers are those of the record's profiles.
    """
    setting, pairs = Setting(profile), Pairs()
    for run in setting.runs:
        receiver, sender = setting.pair(run)
        to_choose, _ = setting.items(run, receiver.tokenizer)
        labels, profiled = run.row(), run_profile(setting, run, receiver, sender, to_choose)
        pairs.setdefault((labels["receiver"], labels["sender"]), {})[labels["task"]] = profiled_groups(profiled)
    of_library = choose is smallest_within and judge is item_losses
    several = of_library or any(len(by_task) > 1 for by_task in pairs.values())

    def at_bound(groups: Sequence[Profiled]) -> Profiled:
        return choose(groups, BOUND)

    transfers = pairs if several else recorded_pairs()
    rows = [
        {"receiver": receiver_name, "sender": sender_name, "seed": setting.seed} | row
        for by_pair, rows_of in (
            (transfers, lambda by_task: _transfers(by_task, setting.seed, at_bound, judge)),
            (pairs, lambda by_task: _choices(by_task, setting.seed, at_bound)),
        )
        for (receiver_name, sender_name), by_task in by_pair.items()
        for row in rows_of(by_task)
    ]
    return Outcome(rows, provenance={"models": setting.models.provenance})


def recorded_pairs() -> Pairs:
    """Return the record's profiles of pairs with several tasks: the score of each of its items over every group."""
    recorded, pairs = load_result("layer_profile", "full", machine="any"), Pairs()
    for rows in rows_by_run(recorded.rows if recorded else []).values():
        labels = rows[0]
        pairs.setdefault((labels["receiver"], labels["sender"]), {})[labels["task"]] = profiled_groups(rows)
    return {pair: by_task for pair, by_task in pairs.items() if len(by_task) > 1}


def _transfers(by_task: Profiles, seed: int, at_bound: Chooser, judge: Judge) -> Iterator[dict[str, Any]]:
    shared = set.intersection(*({p.group for p in groups} for groups in by_task.values()))
    by_task = {task: [p for p in groups if p.group in shared] for task, groups in by_task.items()}
    sizes = sorted({len(group) for group in shared})
    rules: list[tuple[str, Chooser]] = [(AT_BOUND, at_bound)]
    rules += [(OF_SIZE, best_of_size(size)) for size in sizes if 0 < size < sizes[-1]]
    for judged_on, judging in by_task.items():
        for chosen_on in (SEEN, *by_task):
            choosing = by_task.get(chosen_on, judging)
            for rule, choose in rules:
                transferred = transfer(
                    choosing, judging, choose, draws=_DRAWS, seed=seed, on_same_items=chosen_on == SEEN, judge=judge
                )
                yield {
                    "what": "transfer",
                    "rule": rule,
                    "chosen_on": chosen_on,
                    "judged_on": judged_on,
                    "layers": round(transferred.layers, 2),
                    "group": str(transferred.usual),
                    "n": len(transferred.item_loss),
                    "loss": sum(transferred.item_loss) / len(transferred.item_loss),
                    "item_loss": [round(loss, 4) for loss in transferred.item_loss],
                }


def _choices(by_task: Profiles, seed: int, at_bound: Chooser) -> Iterator[dict[str, Any]]:
    for task, groups in by_task.items():
        item_count = len(groups[0].own)
        for items in sorted({max(1, item_count // share) for share in _SHARES}):
            for draw, resample in enumerate(resampled(groups, items, at_bound, draws=_RESAMPLES, seed=seed)):
                group = {"lo": resample.group.lo, "hi": resample.group.hi, "layers": len(resample.group)}
                yield (
                    {"what": "choice", "chosen_on": task, "items": items, "draw": draw}
                    | group
                    | {"relative_loss": round(resample.relative_loss, 5)}
                )


def over_own(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[float]:
    """Return by item what the choices of ``row`` lose more than those made on other items of the task that judges them.

    Groups of a fixed size are compared with those of the same size.
    """
    same = ["what", "receiver", "sender", "rule", "judged_on", *(["layers"] if row["rule"] == OF_SIZE else [])]
    own_row, *_ = rows_where(rows, **{name: row[name] for name in same}, chosen_on=row["judged_on"])
    return [loss - theirs for loss, theirs in zip(row["item_loss"], own_row["item_loss"], strict=True)]


def is_foreign(row: dict[str, Any]) -> bool:
    """Return whether the choices of a transfer were made on another task than they were used on."""
    return row["what"] == "transfer" and row["chosen_on"] not in (SEEN, row["judged_on"])


def transfer_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize the loss of each choice where it is used, the further loss of a foreign one over the task's own, and
    how stable a choice is."""
    summary = Summary()
    for row in rows_where(rows, what="transfer", rule=AT_BOUND):
        labels = _place(row)
        summary.add("loss_points", bootstrap(row["item_loss"]).summary("points", 100), **labels)
        if row["chosen_on"] == SEEN:  # the optimism of a choice about its own items
            unseen = bootstrap([-difference for difference in over_own(rows, row)]).summary("points", 100)
            summary.add("loss_points", unseen, **labels | {"chosen_on": row["judged_on"], "than": SEEN})
    for rule in (AT_BOUND, OF_SIZE):
        _add_foreign(summary, rows, rule)
    _add_stability(summary, rows)
    return summary


def _place(row: dict[str, Any]) -> dict[str, str]:
    """Return the place in the summary of the loss of a transfer."""
    run = {"receiver": row["receiver"], "sender": row["sender"], "task": row["judged_on"]}
    return run | {"chosen_on": row["chosen_on"], "variant": row["rule"]}


def _add_foreign(summary: Summary, rows: Rows, rule: str) -> None:
    """Add the loss of foreign choices beyond the task's own: each, the one that loses most, and their mean.

    The sizes of one transfer are averaged item by item, and so are the foreign choices that one item judged.
    """
    by_labels: dict[tuple[tuple[str, str], ...], list[list[float]]] = {}
    by_item: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        if is_foreign(row) and row["rule"] == rule:
            differences = over_own(rows, row)
            by_labels.setdefault(tuple(_place(row).items()), []).append(differences)
            for item, difference in enumerate(differences):
                by_item.setdefault((row["receiver"], row["judged_on"], item), []).append(difference)
    if not by_labels:
        return
    for labels, lists in by_labels.items():
        mean_of_runs = bootstrap([sum(item_losses) / len(item_losses) for item_losses in zip(*lists, strict=True)])
        summary.add("loss_points", mean_of_runs.summary("points", 100), **dict(labels), than=OWN)
    of_rule = {"variant": rule, "than": OWN}
    worst = max(summary.all("loss_points", **of_rule), key=lambda entry: entry["value"])
    mean = bootstrap([sum(item_losses) / len(item_losses) for item_losses in by_item.values()])
    summary.add("loss_points", worst, **of_rule, across="worst")
    summary.add("loss_points", mean.summary("points", 100), **of_rule, across="mean")


def _add_stability(summary: Summary, rows: Rows) -> None:
    """Add by task and sample size the layers chosen (95 % of the draws), and the mean loss on items not drawn."""
    choices = frame_of(rows, what="choice")
    if not len(choices):
        return
    keys = {"receiver": "receiver", "sender": "sender", "task": "chosen_on", "items": "items"}
    for values, choice_rows in choices.groupby(list(keys.values()), sort=False):
        layers = sorted(choice_rows.layers)
        middle, low, high = (layers[round(share * (len(layers) - 1))] for share in (0.5, 0.025, 0.975))
        chosen = {"value": middle, "low": low, "high": high, "n": len(choice_rows), "unit": "layers"}
        summary.add("group_layers", chosen, **dict(zip(keys, values, strict=True)))
        summary.by(choice_rows, keys, {"relative_loss_pct": ("relative_loss", "mean", "% of the own score", 100)})
    if sizes := sorted(set(choices["items"])):
        half = sizes[len(sizes) // 2]  # of all items, the paper's 50 contexts or a few more
        worst = max(summary.all("relative_loss_pct", items=half), key=lambda entry: entry["value"])
        summary.add("relative_loss_pct", worst, items="half", across="worst")


PAPER_WORST, PAPER_MEAN = 4, 2  # points, 5.4


def schematic() -> Schematic:
    """Draw a group of layers that one task chooses, used on another task."""
    alt = (
        "Two rows of twelve layers. Above, the profile of one task, copying, chooses two neighbouring layers that the "
        "receiver recomputes. An arrow hands this group to another task, questions, whose items judge it: their own "
        "profile would have chosen more layers."
    )
    sketch = Schematic(17, 6.4, alt)
    for y, title in (
        (1.0, "One task chooses the group: copying"),
        (4.3, "Another task uses it: questions. What does it lose?"),
    ):
        sketch.text(0.2, y - 0.5, title, heading=True)
        for layer in range(12):
            sketch.box(0.2 + layer, y, str(layer), "droidspeak" if layer in (6, 7) else "full reuse")
    sketch.arrow((7.2, 2.1), (7.2, 3.4))
    sketch.text(7.5, 2.7, "the same group")
    for y, look, text in ((1.1, "droidspeak", "recomputed"), (2.1, "full reuse", "reused")):
        sketch.box(12.9, y, look=look, width=0.7, height=0.7)
        sketch.text(13.8, y + 0.35, text)
    sketch.text(0.2, 5.9, "Questions themselves would have chosen layers 2 to 9.")
    return sketch


def differences(recorded: Result | None, now: Result) -> Figure:
    """Draw the loss of a choice made on another task beyond the task's own: at the bound, and with as many layers.

    A run whose pairs have one task each has no such choice, and is not drawn.
    """
    rules = {AT_BOUND: ("smallest group within the bound, as chosen there", "o"), OF_SIZE: ("equally many layers", "s")}
    of_bound = {"variant": AT_BOUND, "than": OWN}
    both = [shown for shown in over(recorded, now) if shown.result.summary.all("loss_points", **of_bound)]
    both = [replace(shown, index=index, count=len(both)) for index, shown in enumerate(both)]
    points: set[Any] = set()
    entries = [entry for result_drawn in both for entry in result_drawn.result.summary.all("loss_points", **of_bound)]
    places = [entry["where"] for entry in entries if "across" not in entry["where"]] + [of_bound | {"across": "mean"}]
    shown = [labels for index, labels in enumerate(places) if labels not in places[:index]]
    fig, ax = panels(figsize=(9, 0.5 * len(shown) + 2.4))
    colour = METHODS["DroidSpeak"].colour
    for shift, (rule, (label, marker)) in zip((-0.14, 0.14), rules.items(), strict=True):
        fill = "none" if rule == OF_SIZE else "full"
        for result_drawn in both:
            for line, labels in enumerate(shown):
                entry = result_drawn.result.summary.get("loss_points", **labels | {"variant": rule})
                point = (line, rule, entry and entry["value"])
                if entry and (result_drawn.library is None or point not in points):
                    points.add(point)
                    height = line + shift + result_drawn.shift / 3
                    reach = [[entry["value"] - entry["low"]], [entry["high"] - entry["value"]]]
                    ax.errorbar(entry["value"], height, xerr=reach, marker=marker, fillstyle=fill, color=colour,
                                markersize=7, linewidth=1.8, linestyle="none", **result_drawn.outlined)  # fmt: skip
        ax.plot([], [], marker, color=colour, fillstyle=fill, label=label)
    for value, style, label in ((PAPER_MEAN, "-", "paper: mean"), (PAPER_WORST, "--", "paper: at most")):
        ax.axvline(value, color=COLOURS["paper"], linestyle=style, linewidth=2, label=label)
    ax.axvline(0, color=COLOURS["mark"], linestyle=":", linewidth=1.2)
    categories(ax, [_told(labels) for labels in shown])
    ax.set_xlabel("token accuracy lost beyond the task's own choice, points (95 %)")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="center right", fontsize=9)
    if both:
        most = {rule: both[0].result.summary.value("loss_points", **of_bound | {"variant": rule, "across": "worst"})
                for rule in rules}  # fmt: skip
        fig.suptitle(f"A group chosen on another task costs up to {most[AT_BOUND]:.1f} points; with as many layers, "
                     f"{most[OF_SIZE]:.1f}")  # fmt: skip
    name_results(fig, both, "loss_points")
    return fig


def stability(recorded: Result | None, now: Result) -> Figure:
    """Left: how many layers a sample of so many items chooses. Right: what its choices lose elsewhere, on average."""
    from matplotlib.ticker import MaxNLocator

    both = over(recorded, now)
    choices = [(result_drawn, rows_where(result_drawn.result.rows, what="choice")) for result_drawn in both]
    rows = [row for _, of_run in choices for row in of_run]
    runs = list(dict.fromkeys((_pair(row), row["chosen_on"]) for row in rows))
    sizes = sorted({row["items"] for row in rows})
    fig, (layers_panel, right) = panels(1, 2, figsize=(9, 0.62 * len(runs) + 2.6), sharey=True)
    for run_index, (pair, task) in enumerate(runs):
        for step, items in enumerate(sizes):
            height = run_index + 0.8 / len(sizes) * (step - (len(sizes) - 1) / 2)
            for result_drawn, of_run in choices:
                matching = [r for r in of_run if (_pair(r), r["chosen_on"], r["items"]) == (pair, task, items)]
                if matching:
                    _sample(
                        layers_panel, right, height, matching, result_drawn, 0.4 + 0.6 * step / max(1, len(sizes) - 1)
                    )
    layers_panel.set_xlabel(f"layers that a sample chooses at the {100 * BOUND:g} % bound\n(median, 95 % of samples)")
    right.axvline(100 * BOUND, color=COLOURS["paper"], linestyle="--", linewidth=2)
    right.annotate("the bound", (100 * BOUND, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    right.axvline(0, color=COLOURS["mark"], linestyle=":", linewidth=1.2)
    right.set_xlabel("loss on the items not drawn, % of the own score\n(mean of samples)")
    layers_panel.set_xlim(left=-0.5)
    layers_panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    categories(layers_panel, [f"{pair}: {task}" for pair, task in runs])
    for ax in (layers_panel, right):
        ax.grid(axis="y", visible=False)
    sizes_text = ", ".join(map(str, sizes))
    fig.suptitle(f"Samples of {sizes_text} items, from top to bottom: larger ones agree on a group")
    name_results(fig, both)
    return fig


def _sample(layers_panel: Axes, right: Axes, height: float, rows: Rows, shown: DrawnResult, shade: float) -> None:
    """Draw layers and loss of the choices by samples of one size; small samples are lighter."""
    colour, edge = METHODS["DroidSpeak"].colour, {"markeredgecolor": "black"} if shown.own else {}
    style = shown.style | {"color": colour, "alpha": shade * shown.style["alpha"]}
    low, middle, high = np.percentile([row["layers"] for row in rows], [2.5, 50, 97.5])
    lost = bootstrap([row["relative_loss"] for row in rows])
    if shown.repeats(layers_panel, height, (low, middle, high, lost.estimate)):
        return
    points = ((layers_panel, low, middle, high), (right, 100 * lost.low, 100 * lost.estimate, 100 * lost.high))
    for ax, first, value, last in points:
        ax.plot([first, last], [height, height], linewidth=2, **style)
        ax.plot(value, height, "o", markersize=7, **edge, **style)


def matrix_rows(result: Result) -> Rows:
    """The matrix of losses: where a choice was made, where it is used; points, with the group chosen most often."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows_where(result.rows, what="transfer", rule=AT_BOUND):
        line = lines.setdefault((_pair(row), row["chosen_on"]), {"pair": _pair(row), "chosen on": row["chosen_on"]})
        loss = bootstrap(row["item_loss"]).summary("points", 100)
        line[f"used on {row['judged_on']}"] = f"{interval(loss)}, mostly {row['group']}"
    return list(lines.values())


def unseen_rows(result: Result) -> Table:
    """Yield the loss of a choice on other items of its own task beyond that on the items that made it."""
    for entry in result.summary.all("loss_points", than=SEEN):
        yield {"choice": _choice(entry["where"]), "points": interval(entry), "n": entry["n"]}


def _pair(row: Mapping[str, Scalar]) -> str:
    return f"{row['receiver']} <- {row['sender']}"


def _choice(labels: Mapping[str, Scalar]) -> str:
    return f"{labels['receiver']} from {labels['sender']} {labels['chosen_on']}"


def _told(labels: Mapping[str, Scalar]) -> str:
    """A transfer in words, or what stands for several."""
    across = labels.get("across")
    return across or f"{_pair(labels)}: chosen on {labels['chosen_on']}, used on {labels['task']}"
