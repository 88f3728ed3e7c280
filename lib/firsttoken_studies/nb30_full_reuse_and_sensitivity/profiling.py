"""Single layers and contiguous groups of every run (DroidSpeak, 3.2 and 4.2; Figures 7, 8 and 11).

A batch that is done is kept in the cache folder, so that a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import DynamicCache

from firsttoken.droidspeak.forward import layer_kv
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.prefill import PartialPrefill, partial_prefill
from firsttoken.droidspeak.prefix import PrefixCache
from firsttoken.droidspeak.profile.layer_profiler import LayerProfiler, Questions, Score
from firsttoken.droidspeak.profile.pareto import Profiled, critical_layers, frontier, smallest_within
from firsttoken.study import paths, timing
from firsttoken.study.files import write_text
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.schema import parse_as
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Entry, Summary
from firsttoken_studies.droidspeak.pairs import PairedModel, weight_distance
from firsttoken_studies.droidspeak.reuse_items import Encoded
from firsttoken_studies.droidspeak.setting import Run, Setting, batches, rows_by_run, run_of
from firsttoken_studies.record.results import Outcome, Rows

BOUND = 0.05  # of the receiver's own score (DroidSpeak, 5.1: "within 5 %"; the report: points, errata I41)
_SCORING = 1  # raised when what a batch holds is made in another way
GROUP, REUSE, CHOICE, RULE = "group", "reuse", "choice", "rule"  # kinds of rows
Choice: TypeAlias = Callable[[Sequence[Profiled], float], tuple[list[Profiled], Profiled]]
Mixture: TypeAlias = Callable[[PrefixCache, PrefixCache, Collection[int]], DynamicCache]  # own, sent, layers reused
CriticalRule: TypeAlias = Callable[[Sequence[float], float], list[int]]  # a score for each layer, and the own score
CRITICAL = 0.10  # Figure 7: a layer whose reuse alone costs more than a tenth of the score


def frontier_and_choice(groups: Sequence[Profiled], bound: float) -> tuple[list[Profiled], Profiled]:
    """Return the Pareto frontier of ``groups``, and its group of fewest layers within ``bound``."""
    return frontier(groups), smallest_within(groups, bound)


def layer_profile(
    profile: Profile,
    *,
    partial: PartialPrefill = partial_prefill,
    choose: Choice = frontier_and_choice,
    reused: Mixture | None = None,
    critical: CriticalRule | None = None,
) -> Outcome:
    """One row a run and mixture, with an item's ``accuracy`` and ``nll`` each in lists of one order.

    The last row of a run, ``what`` is weights, has how far receiver and sender are apart. ``partial`` makes the cache
    of a group, ``reused`` the receiver's cache with some layers of the sender's, all of them in full reuse; ``choose``
    makes the choice among the groups, and ``critical`` names layers. Where these two are not the library's, which a
    figure applies to the scores, their outcome is in a row, too: ``what`` is choice, or rule.
    """
    setting = Setting(profile)
    rows = []
    for run in setting.runs:
        receiver, sender = setting.pair(run)
        chosen, _ = setting.items(run, receiver.tokenizer)
        profiled = run_profile(setting, run, receiver, sender, chosen, partial, reused)
        if critical is not None:
            layers, own_score = scores_of_layers(profiled)
            profiled.append({"what": RULE, "critical": critical([score for _, score in layers], own_score)})
        if choose is not frontier_and_choice:
            best, within = choose(profiled_groups(profiled), BOUND)
            groups = {
                "frontier": [(g.group.lo, g.group.hi) for g in best],
                "lo": within.group.lo,
                "hi": within.group.hi,
            }
            profiled.append({"what": CHOICE} | groups)
        apart = {"what": "weights", "distance_pct": 100 * weight_distance(receiver.model, sender.model)}
        rows += [run.row() | row for row in [*profiled, apart]]
    return Outcome(rows, provenance={"models": setting.models.provenance})


def profile_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize the profile of each run, all profiles together, and the saving of groups of two layers."""
    summary, runs = Summary(), list(rows_by_run(rows).values())
    for run_rows in runs:
        _add_run(summary, run_rows)
    groups, lost = summary.all("group_layers_pct"), summary.all("relative_loss_pct")
    losing = [run_rows for run_rows, group in zip(runs, groups, strict=True) if group["value"]]
    depth = sum(row["what"] == "layer" for row in runs[-1])
    widest = bootstrap([_widest_layer(run_rows) / depth for run_rows in losing or runs])
    summary.add("widest_layer_depth", widest.summary("of the depth"), across="mean")
    summary.add("critical_layers_pct", _mean(summary.all("critical_layers_pct")), across="mean")
    breaking = {"value": len(losing), "n": len(runs), "unit": "runs in which full reuse breaks the bound"}
    summary.add("runs_with_loss", breaking)
    summary.add("group_layers_pct", _mean([group for group in groups if group["value"]] or groups), across="mean")
    worst = max(lost, key=lambda entry: entry["value"])
    summary.add("relative_loss_pct", worst, method="full reuse", across="worst")
    fewer = {"value": naive_passes(depth, 1) / naive_passes(depth, 2), "unit": "x fewer layers over a prefix"}
    summary.add("prefix_passes_fewer_x", fewer, variant="naive", layers=2, than="single layers")
    return summary


def _widest_layer(run_rows: Rows) -> int:
    """The layer whose reuse alone costs the most different amounts of token accuracy from item to item."""
    (own_accuracy,) = [np.array(row["item_accuracy"]) for row in run_rows if row["what"] == "own"]
    spread = {
        row["lo"]: float((own_accuracy - row["item_accuracy"]).std()) for row in run_rows if row["what"] == "layer"
    }
    return max(spread, key=spread.__getitem__)


@dataclass(frozen=True)
class _Done:
    seconds: float
    prefix_layers: float
    scores: list[tuple[str, int, int, list[float], list[float]]]


def _done(cache_file: Path) -> dict[str, Any] | None:
    """A batch that was kept; None where there is none, or it is damaged: it is then made again."""
    with suppress(OSError, ValueError):
        return vars(parse_as(_Done, read_json(cache_file)))
    return None


def run_profile(
    setting: Setting,
    run: Run,
    receiver: PairedModel,
    sender: PairedModel,
    items: Sequence[Encoded],
    partial: PartialPrefill = partial_prefill,
    reused: Mixture | None = None,
) -> list[dict[str, Any]]:
    """Rows of one run: ``kind`` is own, sender, reuse, layer or group, with ``lo`` and ``hi`` where it has layers.

    What another ``partial`` or ``reused`` than the library's makes is scored anew, and not kept.
    """
    parts = list(batches(items, setting.config.batch))
    folder = paths.CACHE / "profiles" / batch_key(_SCORING, run, receiver, sender, parts)
    gathered: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    passes = seconds = 0.0
    for index, part in enumerate(track(parts, desc=f"profile {run.name}", unit="batch")):
        cache_file = folder / f"{index}.json"
        if (done := _done(cache_file)) is not None:
            timing.add_resumed(done["seconds"])
        else:
            done = _batch(run, receiver, sender, part)
            write_text(cache_file, json.dumps(done))
        seconds, passes = seconds + done["seconds"], passes + done["prefix_layers"]
        made = _made_anew(run, receiver, sender, part, partial, reused)
        for kind, lo, hi, nll, accuracy in {tuple(score[:3]): score for score in [*done["scores"], *made]}.values():
            entry = gathered.setdefault((kind, lo, hi), {"item_nll": [], "item_accuracy": []})
            entry["item_nll"] += nll
            entry["item_accuracy"] += accuracy
    rows = [
        {"what": kind, "lo": lo, "hi": hi, "layers": hi - lo, "n": len(scores["item_nll"])}
        | {name.replace("item_", ""): round(sum(v) / len(v), 5) for name, v in scores.items()}
        | scores
        for (kind, lo, hi), scores in gathered.items()
    ]
    passes_an_item = round(passes / len(parts))  # every batch takes the same ones
    return [*rows, {"what": "cost", "seconds": round(seconds, 2), "prefix_layers": passes_an_item, "n": len(items)}]


def setting_profile(setting: Setting, run: Run) -> tuple[PairedModel, PairedModel, list[Profiled]]:
    """Receiver, sender and the profiled groups of ``run``."""
    receiver, sender = setting.pair(run)
    to_choose, _ = setting.items(run, receiver.tokenizer)
    return receiver, sender, profiled_groups(run_profile(setting, run, receiver, sender, to_choose))


def batch_key(
    scoring: object, run: Run, receiver: PairedModel, sender: PairedModel, parts: Sequence[Sequence[Encoded]]
) -> str:
    """Return the key of kept batches: a digest of the scoring, both models, the edges, and the items as they are
    batched."""
    tokens = [[item.tokens for item in part] for part in parts]
    models = [(v.weights, v.adapter, str(v.model.dtype)) for v in (receiver, sender)]
    identity = repr((scoring, models, run.step, tokens))
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _batch(run: Run, receiver: PairedModel, sender: PairedModel, part: Sequence[Encoded]) -> dict[str, Any]:
    start = time.perf_counter()
    edges = run.edges(receiver.model.config.num_hidden_layers)
    questions = Questions.of([item.tokens for item in part], receiver.model.device)
    profiler = LayerProfiler(sender.model, receiver.model, questions, edges[:-1])
    scores = [_kept("own", NOTHING, profiler.prefill()), _kept("sender", NOTHING, profiler.sender_itself())]
    scores += [_kept("layer", Group(layer, layer + 1), score) for layer, score in profiler.single_layers()]
    scores += [_kept(GROUP if len(g) else REUSE, g, score) for g, score in profiler.groups(edges)]
    return {"seconds": time.perf_counter() - start, "prefix_layers": profiler.prefix_layers, "scores": scores}


@torch.inference_mode()
def _made_anew(
    run: Run,
    receiver: PairedModel,
    sender: PairedModel,
    part: Sequence[Encoded],
    partial: PartialPrefill,
    reused: Mixture | None,
) -> list[list[Any]]:
    """Return the scores of a batch over each cache that a reader's ``partial`` or ``reused`` makes, none of it
    shared."""
    if partial is partial_prefill and reused is None:
        return []
    edges = run.edges(receiver.model.config.num_hidden_layers)
    questions = Questions.of([item.tokens for item in part], receiver.model.device)
    profiler = LayerProfiler(sender.model, receiver.model, questions, edges[:-1])

    def scored(kind: str, group: Group, cache: DynamicCache) -> list[Any]:
        kv = [layer_kv(cache, layer) for layer in range(profiler.depth)]
        return _kept(kind, group, profiler.over(kv))

    scores = []
    if partial is not partial_prefill:
        for group in [NOTHING, *(Group(lo, hi) for lo, hi in combinations(edges, 2))]:
            cache = partial(receiver.model, questions.prefix, profiler.sent, group)
            scores.append(scored(GROUP if len(group) else REUSE, group, cache))
    if reused is not None:
        recomputed, depth = PrefixCache(tuple(profiler.own), {}), profiler.depth
        scores.append(scored(REUSE, NOTHING, reused(recomputed, profiler.sent, range(depth))))
        for layer in range(depth):
            scores.append(scored("layer", Group(layer, layer + 1), reused(recomputed, profiler.sent, [layer])))
    return scores


def _kept(kind: str, group: Group, score: Score) -> list[Any]:
    rounded = ([round(v, 3) for v in values.tolist()] for values in (score.nll, score.accuracy))
    return [kind, group.lo, group.hi, *rounded]


def profiled_groups(rows: Sequence[dict[str, Any]]) -> list[Profiled]:
    """Return the profiled groups of a run, with each mixture's loss of accuracy against the receiver's own, by item."""
    own_accuracy = next(row for row in rows if row["what"] == "own")["item_accuracy"]
    return [
        Profiled(Group(row["lo"], row["hi"]), tuple(own_accuracy), tuple(row["item_accuracy"]))
        for row in rows
        if row["what"] in (GROUP, REUSE)
    ]


def choice_of(rows: Sequence[dict[str, Any]]) -> tuple[list[Profiled], Profiled]:
    """Return the frontier of a run's profile and the group that is chosen: by the reader's rule where a row has it."""
    groups = profiled_groups(rows)
    made = next((row for row in rows if row["what"] == CHOICE), None)
    if made is None:
        return frontier_and_choice(groups, BOUND)
    by_layers = {(profiled.group.lo, profiled.group.hi): profiled for profiled in groups}
    return [by_layers[tuple(layers)] for layers in made["frontier"]], by_layers[made["lo"], made["hi"]]


def scores_of_layers(rows: Sequence[dict[str, Any]]) -> tuple[list[tuple[int, float]], float]:
    """Return each layer with the token accuracy where it alone is reused, and the receiver's own."""
    layers = sorted((row["lo"], row["accuracy"]) for row in rows if row["what"] == "layer")
    return layers, next(row["accuracy"] for row in rows if row["what"] == "own")


def critical_of(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the critical layers of a run: by the reader's rule where a row has them, else by that of Figure 7."""
    made = next((row["critical"] for row in rows if row["what"] == RULE), None)
    return critical_layers(*scores_of_layers(rows), CRITICAL) if made is None else made


def _add_run(summary: Summary, rows: Rows) -> None:
    """Add the measures of a run's profile, with the distance of its weights where the rows have it."""
    own_row, cost = (next(row for row in rows if row["what"] == kind) for kind in ("own", "cost"))
    groups = profiled_groups(rows)
    reuse = next(group for group in groups if not len(group.group))
    critical, chosen, depth = critical_of(rows), choice_of(rows)[1], len(scores_of_layers(rows)[0])
    share, naive = 100 * len(chosen.group) / depth, sum(len(g.group) for g in groups) / depth
    full, reused, mixed = ({"method": name} for name in ("full prefill", "full reuse", "DroidSpeak"))
    entries: list[tuple[str, Entry, dict[str, str]]] = [
        ("accuracy_pct", {"value": 100 * own_row["accuracy"], "n": own_row["n"], "unit": "%"}, full),
        ("loss_points", reuse.loss.summary("points", 100), reused),
        ("relative_loss_pct", {"value": 100 * reuse.relative_loss, "n": own_row["n"], "unit": "% of own"}, reused),
        ("critical_layers_pct", {"value": 100 * len(critical) / depth, "n": depth, "unit": "% of layers"}, {}),
        ("group", {"value": str(chosen.group), "unit": "layers"}, {}),
        ("group_layers_pct", {"value": share, "n": own_row["n"], "unit": "% of layers"}, {}),
        ("loss_points", chosen.loss.summary("points", 100), mixed),
        ("profile_s", {"value": cost["seconds"], "n": cost["n"], "unit": "s"}, {}),
        ("prefix_passes", {"value": cost["prefix_layers"] / depth, "unit": "prefills an item"}, {"variant": "shared"}),
        ("prefix_passes", {"value": naive, "unit": "prefills an item"}, {"variant": "naive"}),
    ]
    apart = [row["distance_pct"] for row in rows if row["what"] == "weights"]
    entries += [("weight_distance_pct", {"value": distance, "unit": "% of |sender|"}, {}) for distance in apart]
    for measure, entry, labels in entries:
        summary.add(measure, entry, **labels, **run_of(rows[0]))


def naive_passes(depth: int, group_layers: int) -> float:
    """Prefills an item takes where every contiguous group is prefilled by itself, in units of ``depth`` layers."""
    edges = [*range(0, depth, group_layers), depth]
    return sum(hi - lo for i, lo in enumerate(edges) for hi in edges[i + 1 :]) / depth


def _mean(entries: Sequence[Entry]) -> Entry:
    """The mean of one measure over runs, with its interval."""
    return bootstrap([entry["value"] for entry in entries]).summary(entries[0]["unit"])
