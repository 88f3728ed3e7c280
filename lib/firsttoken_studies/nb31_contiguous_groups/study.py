"""Why one contiguous group: the error by the number of transitions, equally many layers (DroidSpeak, Figure 10)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from firsttoken.assets.needs import LAYERS, Need
from firsttoken.droidspeak.forward import layer_kv
from firsttoken.droidspeak.prefill import PartialPrefill, partial_prefill, spans
from firsttoken.droidspeak.prefix import LayerKV, Prefix, PrefixCache
from firsttoken.droidspeak.profile.layer_profiler import LayerProfiler, Questions
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken_studies.droidspeak.setting import ITEMS, Setting, batches
from firsttoken_studies.record.results import Outcome, Rows, frame_of


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


def transitions(profile: Profile, *, partial: PartialPrefill = partial_prefill) -> Outcome:
    """One row a run and set of layers: distance of the output from the receiver's own, likelihood and accuracy lost.

    ``partial`` computes each contiguous group of a set: a reader's in place of the library's, which shares what sets
    have in common.
    """
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
                if partial is partial_prefill:
                    score = profiler.scattered(layers)
                else:
                    score = profiler.over(_scattered(receiver.model, questions.prefix, profiler.sent, layers, partial))
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


@torch.inference_mode()
def _scattered(
    model: PreTrainedModel, prefix: Prefix, sent: PrefixCache, layers: Sequence[int], partial: PartialPrefill
) -> list[LayerKV]:
    """Return the sender's keys and values with those of ``layers`` as ``partial`` computes them, group by group."""
    kv = list(sent.kv)
    for group in spans(layers):
        cache = partial(model, prefix, sent, group)
        kv[group.lo : group.hi] = [layer_kv(cache, layer) for layer in group.layers]
    return kv


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
