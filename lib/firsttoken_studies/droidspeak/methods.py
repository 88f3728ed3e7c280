"""Every method on every run: what it answers, decoded and scored, and how long it takes (Figure 14).

The profile of a run gives the candidates: its Pareto frontier by token accuracy (``profiling``). All of them answer the
items of the profile, and the smallest one that keeps to the bound by the score of decoded answers is chosen. It and the
other methods answer other items. What takes how long is measured apart (``latency``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import DynamicCache

from firsttoken.assets.needs import LAYERS, Need
from firsttoken.droidspeak.blend import blended_cache, tokens_per_layer
from firsttoken.droidspeak.forward import cache_of
from firsttoken.droidspeak.items import Encoded
from firsttoken.droidspeak.prefill import NOTHING, Group
from firsttoken.droidspeak.prefix import Prefix, PrefixCache
from firsttoken.droidspeak.profile.pareto import Profiled, frontier, smallest_within
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Scalar
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken_studies.droidspeak.decoding import (
    DROIDSPEAK,
    OWN,
    REUSE,
    Method,
    decoded_scores,
    own,
    own_cache,
    partial,
)
from firsttoken_studies.droidspeak.pairs import HALF, PairedModel
from firsttoken_studies.droidspeak.profiling import BOUND, profiled_groups, run_profile
from firsttoken_studies.droidspeak.setting import Run, Setting
from firsttoken_studies.droidspeak.speedups import TimeShares, times_here
from firsttoken_studies.droidspeak.tasks.load import task_of

SENDER, SMALLER = "sender", "smaller model"
BLEND, COMPUTE, LATENCY = "CacheBlend", "equal compute", "equal latency"
CHOOSE, JUDGE = "choose", "judge"  # what a row's items are for


@dataclass(frozen=True)
class MethodsConfig:
    """``blends`` are (share, gradual, whole) as text: "0.15", "0.15 gradual", "0.15 from 2".

    "equal compute" takes the share that computes as much as the chosen group, "equal latency" the one that takes as
    long. ``smaller`` is the adapter of the smaller model ("": none), for its own tasks. The first ``runs`` runs of the
    profile are asked.
    """

    blends: tuple[str, ...]
    smaller: str
    runs: int

    def needs(self) -> list[Need]:
        """Every blend is one, and leaves layers to choose tokens for."""
        whole = [_blend(text, {COMPUTE: 0, LATENCY: 0}, sys.maxsize)[2] for text in self.blends]
        return [Need("methods.blends (and a layer that is blended)", max(whole, default=0) + 1, LAYERS)]


def reuse_methods(profile: Profile) -> Outcome:
    """One row a run, method and set of ``items``: score, each item's ``item_score``, and ``time_share`` by round.

    ``time_share`` is the time to the first token over full prefill's, from the result of prefill_latency for this
    machine, at its longest prefix. A candidate has ``accuracy_lost_pct`` as well, what it loses of the own token
    accuracy on the same items. Raises RequestError where there are no times.
    """
    config, times = profile.section("methods", MethodsConfig), times_here()
    setting = Setting(profile, config.needs())
    rows = []
    for run in setting.runs[: config.runs]:
        receiver, sender = setting.pair(run)
        to_choose, to_judge = setting.items(run, receiver.tokenizer)
        profiled = profiled_groups(run_profile(setting, run, receiver, sender, to_choose))
        candidates = list(_candidates(receiver, profiled))
        lost = {one.group: 100 * one.relative_loss for one in profiled} | {candidates[0].group: 0.0}
        answered = [
            row | {"accuracy_lost_pct": lost[Group(row["lo"], row["hi"])]}
            for row in _rows(setting, run, receiver, sender, candidates, times, CHOOSE, to_choose)
        ]
        chosen = smallest_within(decoded_groups(answered), BOUND).group
        methods = list(_methods(setting, config, run, receiver, sender, chosen, times))
        rows += [*answered, *_rows(setting, run, receiver, sender, methods, times, JUDGE, to_judge)]
    return Outcome(rows, provenance={"models": setting.models.provenance, "times": times.provenance})


def decoded_groups(rows: Rows) -> list[Profiled]:
    """The groups of a run with the scores of decoded answers that choose among them."""
    rows = [row for row in rows if row["items"] == CHOOSE]
    own = next(row for row in rows if row["method"] == OWN)["item_score"]
    return [Profiled(Group(row["lo"], row["hi"]), tuple(own), tuple(row["item_score"])) for row in rows]


def _candidates(receiver: PairedModel, groups: Sequence[Profiled]) -> Iterator[Method]:
    """Full prefill, full reuse, and every group of the profile's frontier between them."""
    depth = receiver.model.config.num_hidden_layers
    yield own(receiver)
    yield partial(REUSE, receiver, NOTHING)
    for group in (one.group for one in frontier(groups)):
        if 0 < len(group) < depth:
            yield partial(f"{DROIDSPEAK} {group}", receiver, group)


def _methods(
    setting: Setting,
    config: MethodsConfig,
    run: Run,
    receiver: PairedModel,
    sender: PairedModel,
    chosen: Group,
    times: TimeShares,
) -> Iterator[Method]:
    model, depth = receiver.model, receiver.model.config.num_hidden_layers
    yield own(receiver)
    yield Method(SENDER, "sender", 1.0, lambda prefix, sent: cache_of(sent.kv), sender)
    yield partial(REUSE, receiver, NOTHING)
    yield partial(DROIDSPEAK, receiver, chosen)
    compute = len(chosen) / depth
    equal = {COMPUTE: compute, LATENCY: times.compute_of(BLEND, times.median(DROIDSPEAK, compute))}
    for text in config.blends:
        share, gradual, whole = _blend(text, equal, depth)

        def blended(
            prefix: Prefix, sent: PrefixCache, share: float = share, gradual: bool = gradual, whole: int = whole
        ) -> DynamicCache:
            return blended_cache(model, prefix, sent, share, gradual, whole=whole)

        compute = sum(tokens_per_layer(1000, depth, share, gradual, whole)) / (1000 * depth)
        yield Method(f"{BLEND} {text}", f"blend {share:.4f} {gradual} {whole}", compute, blended, receiver)
    if config.smaller and run.row()["task"] in config.smaller.removeprefix(f"{HALF}-").split("-"):
        half = setting.models.load(config.smaller)
        recipe, compute = f"{half.weights} {half.adapter}", half.model.config.num_hidden_layers / depth
        yield Method(SMALLER, recipe, compute, lambda prefix, sent: own_cache(half, prefix), half)


def _blend(text: str, equal: Mapping[str, float], depth: int) -> tuple[float, bool, int]:
    """Share (of tokens, to four digits), gradual and whole layers of a blend as the profile writes it.

    ``equal`` has the compute that the words stand for. Raises ProfileError for anything else.
    """
    found = re.fullmatch(rf"({COMPUTE}|{LATENCY}|[01]|0?\.\d+)( gradual)?(?: from (\d+))?", text)
    whole = int(found[3] or 1) if found else 0
    if not found or not 1 <= whole < depth:
        raise ProfileError(
            f"blend {text!r}: write it as '0.15', '{COMPUTE}', '{LATENCY}', '0.15 gradual' or '0.15 from 2' (< {depth})"
        )
    share = (depth * equal[found[1]] - whole) / (depth - whole) if found[1] in equal else float(found[1])
    return round(min(1.0, max(0.0, share)), 4), bool(found[2]), whole


def _rows(
    setting: Setting,
    run: Run,
    receiver: PairedModel,
    sender: PairedModel,
    methods: Sequence[Method],
    times: TimeShares,
    items: str,
    encoded: Sequence[Encoded],
) -> Rows:
    """What each of ``methods`` answers to the items that are there to choose or to judge."""
    scores = decoded_scores(run, receiver, sender, methods, encoded, setting.config.batch)
    metric = task_of(encoded[0].item).metric
    return [
        run.row()
        | {
            "items": items,
            "method": method.name,
            "metric": metric,
            "compute": round(method.compute, 4),
            "lo": method.group.lo,
            "hi": method.group.hi,
            "depth": receiver.model.config.num_hidden_layers,
            "time_share": [round(float(share), 4) for share in times.of(timed(method.name), method.compute)],
            "n": len(scores[method.name]),
            "score": sum(scores[method.name]) / len(encoded),
            "item_score": scores[method.name],
        }
        for method in methods
    ]


def timed(method: str) -> str:
    """What a method is called where times are measured: by how much it computes full reuse is a partial prefill."""
    return DROIDSPEAK if method.startswith((REUSE, DROIDSPEAK)) else BLEND if method.startswith(BLEND) else method


def where_of(method: str) -> dict[str, Scalar]:
    """Where the measures of a row's method hold: a blend has its ``share`` of tokens, or the ``case`` that set it."""
    found = re.fullmatch(rf"{BLEND} (?:({COMPUTE}|{LATENCY})|(\S+)) ?(.*)", method)
    if not found:
        return {"method": method}
    asked = {"case": found[1]} if found[1] else {"share": float(found[2])}
    return {"method": BLEND} | asked | ({"variant": found[3]} if found[3] else {})
