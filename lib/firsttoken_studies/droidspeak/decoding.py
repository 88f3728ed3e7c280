"""What several ways to come by a cache answer to the same items, decoded together and scored.

Partial prefill's caches of one batch differ in their keys and values alone, so their answers are decoded as one batch:
a step over eight rows costs the processor nearly as much as one over sixty. Scores that are done are kept in the cache
folder, so that a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from transformers import DynamicCache

from firsttoken.droidspeak.forward import cache_of, layer_kv
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.prefill import PartialPrefill, full_prefill, partial_prefill
from firsttoken.droidspeak.prefix import LayerKV, Prefix, PrefixCache
from firsttoken.droidspeak.profile.pareto import Profiled, smallest_within
from firsttoken.droidspeak.profile.profile_transfer import ResampledChoice, resampled, select_items
from firsttoken.study import paths, timing
from firsttoken.study.files import write_text
from firsttoken.study.progress import track
from firsttoken_studies.droidspeak.answer_decoding import greedy
from firsttoken_studies.droidspeak.constructed_tasks import task_of
from firsttoken_studies.droidspeak.pairs import PairedModel
from firsttoken_studies.droidspeak.reuse_items import Encoded
from firsttoken_studies.droidspeak.setting import Run, batches
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, batch_key
from firsttoken_studies.record.results import Rows, rows_where

OWN, REUSE, DROIDSPEAK = "full prefill", "full reuse", "DroidSpeak"
CHOOSE, JUDGE = "choose", "judge"  # what a row's items are for
READER = "the reader's "  # begins the recipe of a mechanism that is no library's: nothing of it is kept between runs
GroupChoice: TypeAlias = Callable[[Sequence[Profiled], float, Sequence[int], Sequence[int]], tuple[Group, float]]
_SAMPLES = 200  # of the items that choose
OWN_CACHE = "own cache"  # of an agent's last turn
_DECODING = "decoded 1"  # another name when what is kept is made in another way
_TOGETHER_BYTES = 2**30  # of caches that are decoded as one batch


@dataclass(frozen=True)
class Method:
    """One way to have a cache; ``compute`` is its share of a prefill's token-layers, ``group`` what it recomputes.

    ``recipe`` says all that its answers depend on besides pair and items: what is kept is found by it.
    """

    name: str
    recipe: str
    compute: float
    cache: Callable[[Prefix, PrefixCache], DynamicCache]
    model: PairedModel
    group: Group = NOTHING


def own(receiver: PairedModel) -> Method:
    """Return the method of the receiver's own full prefill."""
    group = Group(0, receiver.model.config.num_hidden_layers)
    return Method(OWN, "own", 1.0, lambda prefix, sent: own_cache(receiver, prefix), receiver, group)


def partial(name: str, receiver: PairedModel, group: Group, prefill: PartialPrefill = partial_prefill) -> Method:
    """The sender's cache with ``group`` recomputed by the receiver, by the function ``prefill``."""

    @torch.inference_mode()
    def mixed(prefix: Prefix, sent: PrefixCache) -> DynamicCache:
        return prefill(receiver.model, prefix, sent, group)

    recipe = f"group {group}" if prefill is partial_prefill else f"{READER}group {group}"
    return Method(name, recipe, len(group) / receiver.model.config.num_hidden_layers, mixed, receiver, group)


def own_cache(variant: PairedModel, prefix: Prefix) -> DynamicCache:
    """Return the cache that ``variant`` itself computes for ``prefix``."""
    return cache_of(full_prefill(variant.model, prefix).kv)


def decoded_scores(
    run: Run, receiver: PairedModel, sender: PairedModel, methods: Sequence[Method], items: Sequence[Encoded], size: int
) -> dict[str, list[float]]:
    """The score of each item (0..1) by method, all in one order; ``size`` items are prefilled at a time."""
    scores: dict[str, list[float]] = {method.name: [] for method in methods}
    parts = list(batches(items, size))
    folder = paths.CACHE / "decoded" / batch_key(_DECODING, run, receiver, sender, parts)
    for index, part in enumerate(track(parts, desc=f"answers {run.name}", unit="batch")):
        cache_file = folder / f"{index}.json"
        done = (
            json.loads(cache_file.read_text(encoding="utf-8"))
            if cache_file.is_file()
            else {"seconds": 0.0, "scores": {}}
        )
        timing.add_resumed(done["seconds"])
        if missing := [method for method in methods if method.recipe not in done["scores"]]:
            start = time.perf_counter()
            made = _scored(missing, sender, part)
            if of_library := {recipe: score for recipe, score in made.items() if not recipe.startswith(READER)}:
                done["scores"] |= of_library
                done["seconds"] += time.perf_counter() - start
                write_text(cache_file, json.dumps(done))
            done["scores"] |= made
        for method in methods:
            scores[method.name] += done["scores"][method.recipe]
    return scores


def decoded_groups(rows: Rows) -> list[Profiled]:
    """The groups of a run with the scores of decoded answers that choose among them."""
    rows = rows_where(rows, items=CHOOSE)
    (own_scores,) = (row["item_score"] for row in rows_where(rows, method=OWN))
    return [Profiled(Group(row["lo"], row["hi"]), tuple(own_scores), tuple(row["item_score"])) for row in rows]


def choose_and_judge(
    groups: Sequence[Profiled], bound: float, choosing: Sequence[int], judging: Sequence[int]
) -> tuple[Group, float]:
    """Return the smallest group within ``bound`` on the items ``choosing``, and what it loses on ``judging``."""
    group = smallest_within(select_items(groups, choosing), bound).group
    (judged,) = select_items([profiled for profiled in groups if profiled.group == group], judging)
    return group, judged.relative_loss


def choices_of_samples(rows: Rows) -> list[ResampledChoice]:
    """Return what samples of the items of a run choose and lose on the others, by the rule that made the choice."""
    (judged,) = rows_where(rows, items=JUDGE, method=DROIDSPEAK)
    if "draws" in judged:
        return [ResampledChoice(Group(lo, hi), lost) for lo, hi, lost in judged["draws"]]
    return sampled_choices(rows, choose_and_judge)


def sampled_choices(rows: Rows, choose: GroupChoice) -> list[ResampledChoice]:
    """Return what ``choose`` makes of samples of the items that choose, and its loss on the items not drawn."""
    groups = decoded_groups(rows)
    items = range(len(groups[0].own))

    def of_sample(sampled: Sequence[Profiled]) -> Profiled:
        group, _ = choose(sampled, BOUND, items, items)
        return next(profiled for profiled in sampled if profiled.group == group)

    return resampled(groups, len(items), of_sample, draws=_SAMPLES)


def _scored(methods: Sequence[Method], sender: PairedModel, part: Sequence[Encoded]) -> dict[str, list[float]]:
    """Return by recipe the score of each item of one batch."""
    edges = {method.group.lo for method in methods if method.group.needs_e_cache}
    prefix = Prefix.of([item.prefix for item in part], sender.model.device)
    sent = full_prefill(sender.model, prefix, edges)
    task, scores = task_of(part[0].item), {}
    for together, joined in _stacks(methods, prefix, sent):
        variant, times = together[0].model, len(together)
        prefixes = prefix.rows(torch.arange(len(part)).repeat(times))
        suffix = [item.suffix for item in part] * times
        answers = iter(
            greedy(variant.model, variant.tokenizer, prefixes, suffix, joined, task.answer_tokens, task.stop)
        )
        for method in together:
            scores[method.recipe] = [round(task.score(next(answers), item.item.answers), 4) for item in part]
    return scores


def _stacks(
    methods: Sequence[Method], prefix: Prefix, sent: PrefixCache
) -> Iterator[tuple[list[Method], DynamicCache]]:
    """Methods of one model with their caches as one, as many as ``_TOGETHER_BYTES`` allow."""
    for variant in {id(method.model): method.model for method in methods}.values():
        together, caches, held = [], [], 0
        for method in (method for method in methods if method.model is variant):
            cache = method.cache(prefix, sent)
            size = sum(layer_kv(cache, index).nbytes for index in range(len(cache.layers)))
            if together and held + size > _TOGETHER_BYTES:
                yield together, _joined(caches)
                together, caches, held = [], [], 0
            together, caches, held = [*together, method], [*caches, cache], held + size
        yield together, _joined(caches)


def _joined(caches: Sequence[DynamicCache]) -> DynamicCache:
    """The rows of all caches, one cache after the other, in one."""
    layers = ([layer_kv(cache, index) for cache in caches] for index in range(len(caches[0].layers)))
    return cache_of(LayerKV(*map(torch.cat, zip(*layer, strict=True))) for layer in layers)
