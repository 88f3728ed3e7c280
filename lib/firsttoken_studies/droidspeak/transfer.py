"""A group chosen by the profile of one task, used on another task of the same pair (DroidSpeak, Figure 17)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firsttoken.droidspeak.profile.pareto import Profiled, smallest_within
from firsttoken.droidspeak.profile.transfer import Chooser, best_of_size, resampled, transfer
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak.pairs import Pair
from firsttoken_studies.droidspeak.profiling import BOUND, profiled_groups, run_profile
from firsttoken_studies.droidspeak.setting import Run, Setting

SEEN = "the same items"  # in place of a task's name: the choice was made on the very items that judge it
OWN = "own choice"  # of the task that judges, made on other items of it
AT_BOUND, OF_SIZE = "at the bound", "of a size"
_DRAWS = 20  # random halvings; an item judges one choice in each
_RESAMPLES = 100
_SHARES = (4, 2, 1)  # samples of a quarter, half and all of the items: 32, 64, 128

Profiles = dict[str, Sequence[Profiled]]  # by task


def profile_transfer(profile: Profile) -> Outcome:
    """Rows of two kinds: ``what`` is transfer (a choice made on ``chosen_on``, judged on ``judged_on``) or choice.

    Tasks of one pair choose among the groups that were profiled on all of them.

    A transfer has the loss of every item, the mean over the choices it judged; ``rule`` is "at the bound" (the fewest
    layers that lose at most 5 %) or "of a size" (the best group of ``layers`` layers, so that foreign and own choice
    compute equally much). A choice has the ``group`` that a sample of ``items`` made, and its loss on the others.
    """
    setting = Setting(profile)
    pairs: dict[Pair, tuple[Run, Profiles]] = {}
    for run in setting.runs:
        receiver, sender = setting.pair(run)
        to_choose, _ = setting.items(run, receiver.tokenizer)
        groups = profiled_groups(run_profile(setting, run, receiver, sender, to_choose))
        pairs.setdefault(run.pair, (run, {}))[1][run.row()["task"]] = groups
    rows = []
    for run, by_task in pairs.values():
        of_pair = {name: run.row()[name] for name in ("receiver", "sender")} | {"seed": setting.seed}
        for row in [*_transfers(by_task, setting.seed), *_choices(by_task, setting.seed)]:
            rows.append(of_pair | row)
    return Outcome(rows, provenance={"models": setting.models.provenance})


def _transfers(by_task: Profiles, seed: int) -> Iterator[dict[str, Any]]:
    shared = set.intersection(*({p.group for p in groups} for groups in by_task.values()))
    by_task = {task: [p for p in groups if p.group in shared] for task, groups in by_task.items()}
    sizes = sorted({len(group) for group in shared})
    rules: list[tuple[str, Chooser]] = [(AT_BOUND, _at_bound)]
    rules += [(OF_SIZE, best_of_size(size)) for size in sizes if 0 < size < sizes[-1]]
    for judged_on, judging in by_task.items():
        for chosen_on in (SEEN, *by_task):
            choosing = by_task.get(chosen_on, judging)
            for rule, choose in rules:
                found = transfer(choosing, judging, choose, draws=_DRAWS, seed=seed, seen=chosen_on == SEEN)
                yield {
                    "what": "transfer",
                    "rule": rule,
                    "chosen_on": chosen_on,
                    "judged_on": judged_on,
                    "layers": round(found.layers, 2),
                    "group": str(found.usual),
                    "n": len(found.item_loss),
                    "loss": sum(found.item_loss) / len(found.item_loss),
                    "item_loss": [round(loss, 4) for loss in found.item_loss],
                }


def _at_bound(groups: Sequence[Profiled]) -> Profiled:
    return smallest_within(groups, BOUND)


def _choices(by_task: Profiles, seed: int) -> Iterator[dict[str, Any]]:
    for task, groups in by_task.items():
        whole = len(groups[0].own)
        for items in sorted({max(1, whole // share) for share in _SHARES}):
            for draw, found in enumerate(resampled(groups, items, _at_bound, draws=_RESAMPLES, seed=seed)):
                group = {"lo": found.group.lo, "hi": found.group.hi, "layers": len(found.group)}
                yield (
                    {"what": "choice", "chosen_on": task, "items": items, "draw": draw}
                    | group
                    | {"relative_loss": round(found.relative_loss, 5)}
                )


def over_own(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[float]:
    """By item: what the choices of ``row`` lose more than those made on other items of the task that judges them.

    Of groups of a size, those of the same size are compared.
    """
    same = ["what", "receiver", "sender", "rule", "judged_on", *(["layers"] if row["rule"] == OF_SIZE else [])]
    wanted = {name: row[name] for name in same} | {"chosen_on": row["judged_on"]}
    own = next(other for other in rows if all(other.get(name) == value for name, value in wanted.items()))
    return [mine - theirs for mine, theirs in zip(row["item_loss"], own["item_loss"], strict=True)]


def is_foreign(row: dict[str, Any]) -> bool:
    """Whether the choices of a transfer were made on another task than they were used on."""
    return row["what"] == "transfer" and row["chosen_on"] not in (SEEN, row["judged_on"])


def transfer_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """What each choice loses where it is used, what a foreign one loses more than the task's own, how stable one is."""
    summary = Summary()
    for row in rows:
        if row["what"] == "transfer" and row["rule"] == AT_BOUND:
            place = _place(row)
            summary.add("loss_points", bootstrap(row["item_loss"]).summary("points", 100), **place)
            if row["chosen_on"] == SEEN:  # the optimism of a choice about its own items
                unseen = bootstrap([-difference for difference in over_own(rows, row)]).summary("points", 100)
                summary.add("loss_points", unseen, **place | {"chosen_on": row["judged_on"], "than": SEEN})
    for rule in (AT_BOUND, OF_SIZE):
        _add_foreign(summary, rows, rule)
    _add_stability(summary, rows)
    return summary


def _place(row: dict[str, Any]) -> dict[str, str]:
    """Where the loss of a transfer holds."""
    run = {"receiver": row["receiver"], "sender": row["sender"], "task": row["judged_on"]}
    return run | {"chosen_on": row["chosen_on"], "variant": row["rule"]}


def _add_foreign(summary: Summary, rows: Rows, rule: str) -> None:
    """What foreign choices lose more than the task's own: each, the one that loses most, and their mean.

    The sizes of one transfer are averaged item by item, and so are the foreign choices that one item judged.
    """
    each: dict[tuple[tuple[str, str], ...], list[list[float]]] = {}
    by_item: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        if is_foreign(row) and row["rule"] == rule:
            differences = over_own(rows, row)
            each.setdefault(tuple(_place(row).items()), []).append(differences)
            for item, difference in enumerate(differences):
                by_item.setdefault((row["receiver"], row["judged_on"], item), []).append(difference)
    if not each:
        return
    for place, lists in each.items():
        over = bootstrap([sum(of) / len(of) for of in zip(*lists, strict=True)])
        summary.add("loss_points", over.summary("points", 100), **dict(place), than=OWN)
    of_rule = {"variant": rule, "than": OWN}
    worst = max(summary.all("loss_points", **of_rule), key=lambda entry: entry["value"])
    mean = bootstrap([sum(of) / len(of) for of in by_item.values()])
    summary.add("loss_points", worst, **of_rule, across="worst")
    summary.add("loss_points", mean.summary("points", 100), **of_rule, across="mean")


def _add_stability(summary: Summary, rows: Rows) -> None:
    """By task and sample size: the layers chosen (95 % of the draws), and the mean loss on items not drawn."""
    cells: dict[tuple[str, str, str, int], Rows] = {}
    for row in rows:
        if row["what"] == "choice":
            cells.setdefault((row["receiver"], row["sender"], row["chosen_on"], row["items"]), []).append(row)
    for (receiver, sender, task, items), of in cells.items():
        place = {"receiver": receiver, "sender": sender, "task": task, "items": items}
        layers = sorted(row["layers"] for row in of)
        middle, low, high = (layers[round(share * (len(layers) - 1))] for share in (0.5, 0.025, 0.975))
        chosen = {"value": middle, "low": low, "high": high, "n": len(of), "unit": "layers"}
        lost = bootstrap([row["relative_loss"] for row in of])
        summary.add("group_layers", chosen, **place)
        summary.add("relative_loss_pct", lost.summary("% of the own score", 100), **place)
    if sizes := sorted({items for *_, items in cells}):
        half = sizes[len(sizes) // 2]  # of all items, the paper's 50 contexts or a few more
        worst = max(summary.all("relative_loss_pct", items=half), key=lambda entry: entry["value"])
        summary.add("relative_loss_pct", worst, items="half", across="worst")
