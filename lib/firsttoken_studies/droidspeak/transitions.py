"""Why one contiguous group: the error by the number of transitions, equally many layers (DroidSpeak, Figure 10)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tqdm import tqdm

from firsttoken.assets.needs import LAYERS, Need
from firsttoken.droidspeak.prefill import spans
from firsttoken.droidspeak.profile.bank import Bank, Questions
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak.setting import ITEMS, Setting, batches, rows_by_run


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
        own = [0.0, 0.0]
        parts = list(batches(items, setting.config.batch))
        for part in tqdm(parts, desc=f"transitions {run.name}", unit="batch", disable=None):
            bank = Bank(sender.model, receiver.model, Questions.of(part, receiver.model.device), range(depth))
            reference = bank.prefill()
            own = [own[0] + reference.nll.sum().item(), own[1] + reference.accuracy.sum().item()]
            for _, layers in sets:
                score = bank.scattered(layers)
                for at, values in enumerate((score.deviation, score.nll, score.accuracy)):
                    sums[layers][at] += values.sum().item()
        n = len(items)
        for count, layers in sets:
            deviation, nll, accuracy = (value / n for value in sums[layers])
            rows.append(
                run.row()
                | {"transitions": count, "layers": ",".join(map(str, layers)), "n": n, "seed": setting.seed}
                | {"deviation": round(deviation, 5), "nll_lost": round(nll - own[0] / n, 5)}
                | {"accuracy_lost": round(own[1] / n - accuracy, 5)}
            )
    return Outcome(rows, provenance={"models": setting.models.provenance})


def transitions_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By number of transitions, the distance over the sets of layers: of each run, and of all runs together."""
    summary = Summary()
    runs = [({key: of[0][key] for key in ("receiver", "sender", "task")}, of) for of in rows_by_run(rows).values()]
    for place, of in [*runs, ({"across": "mean"}, rows)]:
        for count in dict.fromkeys(row["transitions"] for row in of):
            deviations = [row["deviation"] for row in of if row["transitions"] == count]
            entry = bootstrap(deviations).summary("of the output's length")
            summary.add("deviation", entry, **place, transitions=count)
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
        seen: set[tuple[int, ...]] = set()
        for _ in range(100 * config.draws):
            if len(seen) == config.draws:
                break
            drawn = _runs(depth, config.layers, count, rng)
            if drawn not in seen:
                seen.add(drawn)
                yield count, drawn


def _runs(depth: int, layers: int, count: int, rng: random.Random) -> tuple[int, ...]:
    """``layers`` of ``depth`` in exactly ``count`` runs: compositions of the recomputed and of the reused layers."""
    lengths = _parts(layers, count, rng)
    gaps = [gap - 1 for gap in _parts(depth - layers - (count - 1) + count + 1, count + 1, rng)]
    found: list[int] = []
    at = gaps[0]
    for i, length in enumerate(lengths):
        found += range(at, at + length)
        at += length + gaps[i + 1] + 1  # at least one reused layer between two runs
    assert len(spans(found)) == count
    return tuple(found)


def _parts(total: int, count: int, rng: random.Random) -> list[int]:
    """``total`` as a sum of ``count`` numbers of at least 1, every such sum equally likely."""
    cuts = [0, *sorted(rng.sample(range(1, total), count - 1)), total]
    return [b - a for a, b in pairwise(cuts)]
