"""Every method on every run: what it answers, decoded and scored, and the share of a prefill it computes (Figure 14).

Groups come from the profile of other items (``profiling``); what takes how long is measured apart (``latency``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import DynamicCache

from firsttoken.assets.needs import LAYERS, Need
from firsttoken.kvreuse.blend import blended_cache, tokens_per_layer
from firsttoken.kvreuse.decode import greedy
from firsttoken.kvreuse.experiments.profiling import BOUND, profiled_groups, run_profile
from firsttoken.kvreuse.experiments.setting import Run, Setting, batches, key_of, rows_by_run
from firsttoken.kvreuse.forward import cache_of
from firsttoken.kvreuse.pairs import HALF, Variant
from firsttoken.kvreuse.prefill import NOTHING, Group, full_prefill, partial_prefill
from firsttoken.kvreuse.prefix import Prefix, PrefixCache
from firsttoken.kvreuse.profile.pareto import Profiled, frontier, smallest_within
from firsttoken.kvreuse.tasks.items import Encoded
from firsttoken.kvreuse.tasks.load import task_of
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap, paired_bootstrap

OWN, REUSE, DROIDSPEAK, SENDER, SMALLER = "full prefill", "full reuse", "DroidSpeak", "sender", "smaller model"


@dataclass(frozen=True)
class MethodsConfig:
    """``frontier`` more groups of each profile's Pareto frontier are answered over, besides the chosen one.

    ``blends`` are (share, gradual, whole) as text, "0.15", "0.15 gradual", "0.15 from 2"; "equal" takes the share that
    computes as much as the chosen group. ``smaller`` is the adapter of the smaller model ("": none), for its own tasks.
    The first ``runs`` runs of the profile are asked.
    """

    frontier: int
    blends: tuple[str, ...]
    smaller: str
    runs: int

    def needs(self) -> list[Need]:
        """Every blend is one, and leaves layers to choose tokens for."""
        whole = [_blend(text, NOTHING, sys.maxsize)[2] for text in self.blends]
        return [Need("methods.blends (and a layer that is blended)", max(whole, default=0) + 1, LAYERS)]


@dataclass(frozen=True)
class Method:
    """One way to have a cache; ``compute`` is its share of a prefill's token-layers, ``group`` what it recomputes."""

    name: str
    compute: float
    cache: Callable[[Prefix, PrefixCache], DynamicCache]
    model: Variant
    group: Group = NOTHING


def reuse_methods(profile: Profile) -> Outcome:
    """One row a run and method: score, share of compute, and each item's ``score``."""
    config = profile.section("methods", MethodsConfig)
    setting = Setting(profile, config.needs())
    rows = []
    for run in setting.runs[: config.runs]:
        receiver, sender = setting.pair(run)
        to_choose, to_judge = setting.items(run, receiver.tokenizer)
        groups = profiled_groups(run_profile(setting, run, receiver, sender, to_choose))
        methods = list(_methods(setting, config, run, receiver, sender, groups))
        scored = _scores(setting, run, methods, sender, to_judge)
        rows += [_row(run, method, scored[method.name], to_judge) for method in methods]
    return Outcome(rows, provenance={"models": setting.models.provenance})


def _methods(
    setting: Setting,
    config: MethodsConfig,
    run: Run,
    receiver: Variant,
    sender: Variant,
    groups: Sequence[Profiled],
) -> Iterator[Method]:
    model, depth = receiver.model, receiver.model.config.num_hidden_layers
    yield _own(receiver)
    yield Method(SENDER, 1.0, lambda prefix, sent: cache_of(sent.kv), sender)
    yield Method(REUSE, 0.0, lambda prefix, sent: cache_of(sent.kv), receiver)
    chosen = smallest_within(groups, BOUND).group
    for group in dict.fromkeys([chosen, *_spread(groups, chosen, config.frontier)]):
        yield _partial(DROIDSPEAK if group == chosen else f"{DROIDSPEAK} {group}", receiver, group)
    for text in config.blends:
        share, gradual, whole = _blend(text, chosen, depth)

        def blended(
            prefix: Prefix, sent: PrefixCache, share: float = share, gradual: bool = gradual, whole: int = whole
        ) -> DynamicCache:
            return blended_cache(model, prefix, sent, share, gradual, whole=whole)

        compute = sum(tokens_per_layer(1000, depth, share, gradual, whole)) / (1000 * depth)
        yield Method(f"CacheBlend {text}", compute, blended, receiver)
    if config.smaller and run.row()["task"] in config.smaller.removeprefix(f"{HALF}-").split("-"):
        half = setting.models.load(config.smaller)
        yield Method(
            SMALLER, half.model.config.num_hidden_layers / depth, lambda prefix, sent: _own_cache(half, prefix), half
        )


def _own(receiver: Variant) -> Method:
    depth = receiver.model.config.num_hidden_layers
    return Method(OWN, 1.0, lambda prefix, sent: _own_cache(receiver, prefix), receiver, Group(0, depth))


def _partial(name: str, receiver: Variant, group: Group) -> Method:
    def mixed(prefix: Prefix, sent: PrefixCache) -> DynamicCache:
        return partial_prefill(receiver.model, prefix, sent, group)

    return Method(name, len(group) / receiver.model.config.num_hidden_layers, mixed, receiver, group)


def _spread(groups: Sequence[Profiled], chosen: Group, count: int) -> list[Group]:
    """``count`` groups of the frontier besides ``chosen``, evenly over its sizes; neither none nor all layers."""
    depth = max(len(g.group) for g in groups)
    inner = [g.group for g in frontier(groups) if 0 < len(g.group) < depth and g.group != chosen]
    if len(inner) <= count:
        return inner
    return [inner[round(i * (len(inner) - 1) / max(1, count - 1))] for i in range(count)]


def _blend(text: str, chosen: Group, depth: int) -> tuple[float, bool, int]:
    """Share, gradual and whole layers of a blend as the profile writes it. Raises ProfileError for anything else."""
    found = re.fullmatch(r"(equal|[01]|0?\.\d+)( gradual)?(?: from (\d+))?", text)
    whole = int(found[3] or 1) if found else 0
    if not found or not 1 <= whole < depth:
        raise ProfileError(f"blend {text!r}: write it as '0.15', 'equal', '0.15 gradual' or '0.15 from 2' (< {depth})")
    share = max(0.0, (len(chosen) - whole) / (depth - whole)) if found[1] == "equal" else float(found[1])
    return share, bool(found[2]), whole


def _own_cache(variant: Variant, prefix: Prefix) -> DynamicCache:
    return cache_of(full_prefill(variant.model, prefix).kv)


def _scores(
    setting: Setting, run: Run, methods: Sequence[Method], sender: Variant, items: Sequence[Encoded]
) -> dict[str, list[float]]:
    """Each method's score of each item, all in one order."""
    edges = {method.group.lo for method in methods if method.group.needs_edge}
    scores: dict[str, list[float]] = {method.name: [] for method in methods}
    parts = list(batches(items, setting.config.batch))
    for part in tqdm(parts, desc=f"methods {run.name}", unit="batch", disable=None):
        prefix = Prefix.of([item.prefix for item in part], sender.model.device)
        sent = full_prefill(sender.model, prefix, edges)
        suffix = [item.suffix for item in part]
        task = task_of(part[0].item)
        for method in methods:
            variant, cache = method.model, method.cache(prefix, sent)
            said = greedy(variant.model, variant.tokenizer, prefix, suffix, cache, task.answer_tokens, task.stop)
            pairs = zip(said, part, strict=True)
            scores[method.name] += [task.score(answer, item.item.answers) for answer, item in pairs]
    return scores


def _row(run: Run, method: Method, scores: Sequence[float], items: Sequence[Encoded]) -> dict[str, Any]:
    return run.row() | {
        "method": method.name,
        "metric": task_of(items[0].item).metric,
        "compute": round(method.compute, 4),
        "lo": method.group.lo,
        "hi": method.group.hi,
        "n": len(scores),
        "score": sum(scores) / len(scores),
        "item_score": [round(score, 4) for score in scores],
    }


def _relative_loss(scores: np.ndarray) -> float:
    """Of [items, 2], own and other score: the share of the own that is lost."""
    own, other = scores.mean(0)
    return float(1 - other / own) if own else 0.0


def methods_summary(rows: Rows, parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each method scores and loses in each run, full reuse at worst, and the mean lead over CacheBlend."""
    summary: dict[str, dict[str, Any]] = {}
    for of in rows_by_run(rows).values():
        summary |= _of_run(key_of(of[0]), of)
    reused = [entry for name, entry in summary.items() if name.endswith("full_reuse_relative_loss_pct")]
    summary["reuse_relative_loss_worst_pct"] = max(reused, key=lambda entry: entry["value"])
    leads = [entry["value"] for name, entry in summary.items() if name.endswith("_over_cacheblend_points")]
    if leads:
        summary["over_cacheblend_mean_points"] = bootstrap(leads).summary("points")
    return summary


def _of_run(key: str, rows: Rows) -> dict[str, dict[str, Any]]:
    """The scores of a run, what each method loses against the receiver's own prefill, and the lead over CacheBlend."""
    by_name = {row["method"]: row for row in rows}
    own = by_name[OWN]["item_score"]
    found = {}
    for name, row in by_name.items():
        slug = f"{key}_{name.replace(' ', '_').replace('-', '_').lower()}"
        found[f"{slug}_pct"] = bootstrap(row["item_score"]).summary("%", 100)
        if name != OWN:
            found[f"{slug}_loss_points"] = paired_bootstrap(own, row["item_score"]).summary("points", 100)
            relative = bootstrap(np.column_stack([own, row["item_score"]]), _relative_loss)
            found[f"{slug}_relative_loss_pct"] = relative.summary("% of own", 100)
    equal = [row for name, row in by_name.items() if name.startswith("CacheBlend equal")]
    if equal:
        best = max(equal, key=lambda row: row["score"])
        lead = paired_bootstrap(by_name[DROIDSPEAK]["item_score"], best["item_score"])
        found[f"{key}_over_cacheblend_points"] = lead.summary("points", 100)
    return found
