"""What a shorter prefill is worth under load (DroidSpeak, 5.3, Figure 15): TTFT, TBT and E2E by requests a second.

Simulated on measured costs: the engine itself serves, on the seconds that ``prefill_latency`` timed for full prefill,
for partial prefill of the groups that were chosen and for full reuse, and on decode steps timed here. The prefills are
those of Hugging Face's modules; the engine's own are 6 % shorter (``recovery_latency``, 1,024 and 2,048 tokens).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.costs.fitted import StepSample, relative_fit
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.kv import KVShape
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import GREEDY, Request, ScheduledChunk
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Arrivals, Item, serve_items, with_arrivals, with_ids
from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Result, Rows, rows_where

# What a step of decoding takes, by how many requests are in it and how long their contexts are.

BLOCK_TOKENS = 16


def decode_rows(model: nn.Module, batches: Sequence[int], contexts: Sequence[int], repeats: int, seed: int) -> Rows:
    """Rows {what: "decode", requests, context, repeat, ms}, in random order; a first round warms up.

    The keys and values of the contexts are the zeros of a fresh pool: how long attention takes hangs on how many there
    are, not on what they hold.
    """
    rng = random.Random(seed)
    blocks_of_each = -(-(max(contexts) + 1) // BLOCK_TOKENS)
    executor = LiveExecutor(model, max(batches) * blocks_of_each, block_tokens=BLOCK_TOKENS)
    cases, rows = list(product(batches, contexts)), []
    try:
        for repeat in track(range(-1, repeats), desc="decode steps", unit="round"):
            for count, context in rng.sample(cases, len(cases)):
                chunks = [
                    _decoding(number, context, blocks_of_each, executor.limits.vocabulary, rng)
                    for number in range(count)
                ]
                start = executor.now()
                executor.execute(chunks)
                ms = (executor.now() - start) * 1e3
                if repeat >= 0:
                    rows.append({"what": "decode", "requests": count, "context": context, "repeat": repeat, "ms": ms})
    finally:
        executor.close()
    return rows


def _decoding(number: int, context: int, blocks: int, vocabulary: int, rng: random.Random) -> ScheduledChunk:
    """A request of blocks of its own with all but its last token cached."""
    request = Request(number, [rng.randrange(vocabulary)] * context, GREEDY, 0.0)
    request.append(rng.randrange(vocabulary), 0.0)
    request.advance(context)
    request.blocks = list(range(number * blocks, (number + 1) * blocks))
    return request.chunk()


# Costs of requests whose prefill was timed by itself, whatever was done to make it shorter; decode steps as fitted.


@dataclass(frozen=True)
class DecodeCosts:
    """Seconds of a step that decodes: as such, for each request in it, and for each token of their contexts."""

    step: float
    request: float
    context_token: float

    def step_s(self, contexts: Sequence[int]) -> float:
        """Return the seconds of a token for each request; ``contexts`` are their cached tokens. 0 without requests."""
        return self.step + self.request * len(contexts) + self.context_token * sum(contexts) if contexts else 0.0


def fit_decode(steps: Sequence[StepSample]) -> DecodeCosts:
    """Non-negative prices with the least squared relative error. Raises CorpusError for fewer than 3 steps."""
    if len(steps) < 3:
        raise CorpusError(f"decode costs: {len(steps)} steps seen; a fit needs at least 3")
    parts = [[1.0, len(step.contexts), sum(step.contexts)] for step in steps]
    return DecodeCosts(*relative_fit(parts, [step.seconds for step in steps]).tolist())


PrefillRule: TypeAlias = Callable[[float, float, float], float]
"""The seconds of a prefill by those of a full one, of what is computed of it, and of what comes over the link."""


def side_by_side(full_s: float, computing_s: float, loading_s: float) -> float:
    """Return the longer of the two: what is reused comes over the link beside the computation."""
    return max(computing_s, loading_s)


@dataclass(frozen=True)
class TimedCosts(Costs):
    """A prefill of ``lengths`` [k] tokens, ascending, takes ``prefill`` [k] seconds; decoding as ``decode`` says.

    Between the lengths the seconds *a token* are a straight line, as attention's share of them grows with the length;
    outside they stay those of the nearest. Where ``loaded_token`` is given, a token of the context takes that many
    seconds on the link, and ``rule`` says what the prefill then takes; ``full`` [k] are the seconds of a full one. A
    swap takes ``moved_token`` seconds a token each way.
    """

    lengths: tuple[int, ...]
    prefill: tuple[float, ...]
    decode: DecodeCosts
    loaded_token: float = 0.0
    moved_token: float = 0.0
    full: tuple[float, ...] = ()
    rule: PrefillRule = side_by_side

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.prefill) or list(self.lengths) != sorted({*self.lengths}) or not self.lengths:
            raise CorpusError(f"a prefill must be timed once for each length, ascending, not for {list(self.lengths)}")

    def prefill_s(self, tokens: int) -> float:
        """A prompt of ``tokens`` tokens by itself."""
        computing_s = self._between(self.prefill, tokens)
        full_s = self._between(self.full, tokens) if self.full else computing_s
        return self.rule(full_s, computing_s, tokens * self.loaded_token)

    def _between(self, seconds: tuple[float, ...], tokens: int) -> float:
        return tokens * float(np.interp(tokens, self.lengths, np.divide(seconds, self.lengths)))

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        prompts = sum(
            self.prefill_s(cached + new) - (self.prefill_s(cached) if cached else 0.0) for cached, new in prefills
        )
        return prompts + self.decode.step_s(contexts)

    def swap_out_s(self, tokens: int) -> float:
        return self.moved_token * tokens

    def swap_in_s(self, tokens: int) -> float:
        return self.moved_token * tokens

    def request_s(self, tokens: int, new_tokens: int) -> float:
        """A request alone: its prefill, and a step for each of ``new_tokens`` after the first."""
        steps = (self.decode.step_s([tokens + token]) for token in range(new_tokens - 1))
        return self.prefill_s(tokens) + sum(steps)


FULL, PARTIAL, REUSE = "full prefill", "DroidSpeak", "full reuse"
KNEE = 2.0  # the objective: twice what a request with a full prefill takes alone
OTHER_KNEES = (1.5, 5.0)


@dataclass(frozen=True)
class ServingConfig:
    """``requests`` a replica, to ``replicas`` in turn, with answers of ``output_tokens``; ``seeds`` draws of all.

    ``loads`` are rates, as shares of what all replicas could prefill. What is reused comes over ``gbit_per_s``. A
    decode step is timed ``decode_repeats`` times for each of ``decode_batches`` requests at every length of prefills.
    """

    replicas: int
    requests: int
    output_tokens: int
    seeds: int
    loads: tuple[float, ...]
    gbit_per_s: float
    decode_batches: tuple[int, ...]
    decode_repeats: int

    def __post_init__(self) -> None:
        least = min(self.replicas, self.requests, self.output_tokens - 1, self.seeds, self.decode_repeats)
        if least < 1 or min(self.decode_batches) < 1:
            raise ProfileError("serving: every number must be at least 1, and output_tokens at least 2")
        if len(self.loads) < 2 or min(self.loads) <= 0 or list(self.loads) != sorted({*self.loads}):
            raise ProfileError("serving.loads needs two or more rates above 0, ascending")
        if self.gbit_per_s <= 0:
            raise ProfileError("serving.gbit_per_s must be above 0")

    def needs(self, prefix: int) -> list[Need]:
        """Require a context that holds the longest ``prefix`` that was timed, and an answer."""
        return [Need("serving.output_tokens", prefix + self.output_tokens, CONTEXT)]


@dataclass(frozen=True)
class ReuseMethod:
    """A way by which requests get their cache: ``layers`` of the model are computed, in the pairs of ``runs``, whose
    profile chose so."""

    method: str
    layers: int
    runs: tuple[str, ...]
    costs: TimedCosts

    @cached_property
    def usual_s(self) -> float:
        """Return the seconds of a prefill, a mean over the lengths."""
        lengths = self.costs.lengths
        return float(np.mean([self.costs.prefill_s(n) for n in range(lengths[0], lengths[-1] + 1)]))


def reuse_throughput(profile: Profile, prefills: Result, *, prefill_s: PrefillRule = side_by_side) -> Outcome:
    """Rows of timed decode steps and fitted prices, and one a way, seed and rate with what its clients saw.

    ``prefills`` is a result of prefill_latency; its model is the one that decodes. Prefixes are as long as any between
    its shortest and its longest, arrivals are Poisson and the same for every way, and go to the replicas in turn (5.3).
    ``prefill_s`` says what a prefill takes whose keys and values come over the link in part.
    """
    config = profile.section("serving", ServingConfig)
    lengths = sorted({row["tokens"] for row in prefills.rows})
    name = prefills.parameters["latency"]["model"] or prefills.parameters["model"]
    check(config.needs(lengths[-1]), ModelFacts(name))
    loaded = load_model(name, dtype=profile.torch_dtype(), device=profile.torch_device(), with_tokenizer=False)
    rows = decode_rows(fuse(loaded.model), config.decode_batches, lengths, config.decode_repeats, profile.seed)
    shape = KVShape.of(loaded.model.config, profile.torch_dtype())
    edge = loaded.model.config.hidden_size * shape.dtype.itemsize
    ways = list(_ways(prefills.rows, rows, shape, edge, config.gbit_per_s * 1e9 / 8, prefill_s))
    cases = [(way, seed) for way in ways for seed in range(profile.seed, profile.seed + config.seeds)]
    for way, seed in track(cases, desc="replicas"):
        rows += [_served(way, config, lengths, seed, load) for load in config.loads]
    timed = {key: getattr(prefills, key) for key in ("git_revision", "started", "profile", "provenance")}
    return Outcome(
        rows, provenance=loaded.provenance.as_dict() | {"prefill_latency": timed | {"machine": prefills.slug}}
    )


def _ways(
    timed: Rows, decoded: Rows, shape: KVShape, edge: int, bytes_per_s: float, rule: PrefillRule
) -> Iterable[ReuseMethod]:
    """Full prefill, every group that keeps to the bound and computes something, and full reuse.

    ``edge`` is the bytes of a token's hidden state, sent beside the keys and values of the layers that are reused.
    """
    decode = fit_decode([StepSample([], [row["context"]] * row["requests"], row["ms"] / 1e3) for row in decoded])
    lengths, depth, groups = sorted({row["tokens"] for row in timed}), timed[0]["depth"], {}
    for row in timed:
        layers = round(row["compute"] * depth)
        chosen = tuple(row.get("chosen_relative", ()))
        if row["method"] == PARTIAL and not layers:
            groups.setdefault((REUSE, 0, ()), []).append(row)
        elif row["method"] == FULL or (row["method"] == PARTIAL and chosen):
            groups.setdefault((row["method"], layers, chosen), []).append(row)

    def seconds(rows: Rows) -> tuple[float, ...]:
        return tuple(float(np.median([row["first_token_s"] for row in rows if row["tokens"] == n])) for n in lengths)

    full = seconds(rows_where(timed, method=FULL))
    for (method, layers, runs), run_rows in sorted(groups.items(), key=lambda entry: -entry[0][1]):
        sent = (depth - layers) * shape.bytes_per_token / depth + (edge if 0 < layers < depth else 0)
        loading, moving = sent / bytes_per_s, shape.bytes_per_token / bytes_per_s
        by_rule = {"full": full, "rule": rule} if method != FULL else {}
        costs = TimedCosts(tuple(lengths), seconds(run_rows), decode, loading, moving, **by_rule)
        yield ReuseMethod(method, layers, runs, costs)


def _served(way: ReuseMethod, config: ServingConfig, lengths: list[int], seed: int, load: float) -> dict[str, Any]:
    """One run: the same prompts at the same places of the same Poisson process for every way, faster or slower."""
    costs, count = way.costs, config.replicas * config.requests
    lengths_drawn = np.random.default_rng(seed).integers(lengths[0], lengths[-1] + 1, count).tolist()
    rate = load * config.replicas / way.usual_s
    items = with_arrivals([Item(0.0, n, config.output_tokens) for n in lengths_drawn], Arrivals(rate, seed=seed))
    items = with_ids(items, vocabulary=1)
    blocks = config.requests * -(-(lengths[-1] + config.output_tokens) // BLOCK_TOKENS)
    served: list[Request] = []
    for replica in range(config.replicas):
        executor = SimulatedExecutor(costs, blocks, block_tokens=BLOCK_TOKENS)
        # a prompt a step: their seconds add up, so that together none would be earlier and the first would be later
        engine = Engine(executor, EngineConfig(watermark=0.0, prefill_tokens=1))
        served += serve_items(engine, items[replica :: config.replicas])
    return (
        {"what": "run", "method": way.method, "layers": way.layers, "runs": list(way.runs), "seed": seed, "load": load}
        | {"qps": rate, "requests": count, "replicas": config.replicas}
        | {"alone_ttft_ms": 1e3 * float(np.mean([costs.prefill_s(n) for n in lengths_drawn]))}
        | {"alone_e2e_ms": 1e3 * float(np.mean([costs.request_s(n, config.output_tokens) for n in lengths_drawn]))}
        | _seen(served)
    )


def _seen(served: list[Request]) -> dict[str, float]:
    """Mean and 90th percentile of TTFT and E2E over requests, and of TBT over the gaps between tokens, in ms."""
    seconds = {
        "ttft": [request.ttft_s for request in served],
        "tbt": np.concatenate([np.diff(request.times_s) for request in served]),
        "e2e": [request.times_s[-1] - request.arrival_s for request in served],
    }
    means = {f"{name}_mean_ms": 1e3 * float(np.mean(values)) for name, values in seconds.items()}
    return means | {f"{name}_p90_ms": 1e3 * float(np.percentile(values, 90)) for name, values in seconds.items()}


def most_qps(rows: Rows, metric: str, objective_ms: float) -> float:
    """The highest rate at which the mean of ``metric`` ("ttft" or "e2e") is within ``objective_ms``.

    ``rows`` are of one way and seed. Straight between the rates, and no more than the highest or less than nothing.
    """
    line = sorted((row["qps"], row[f"{metric}_mean_ms"]) for row in rows)
    rates, means = [0.0, *(qps for qps, _ in line)], [rows[0][f"alone_{metric}_ms"], *(ms for _, ms in line)]
    late = next((index for index, ms in enumerate(means) if ms > objective_ms), None)
    if late is None:
        return rates[-1]
    if late == 0:
        return 0.0
    share = (objective_ms - means[late - 1]) / (means[late] - means[late - 1])
    return rates[late - 1] + share * (rates[late] - rates[late - 1])


def reuse_throughput_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by way the most requests a second within the objective, over full prefill's; paired by seed.

    The report names no objective; here it is ``KNEE`` times what a request with a full prefill takes alone, which is
    where full prefill itself has its knee. The mean is over the pairs whose profile chose to recompute something: where
    full reuse keeps to the bound there is nothing for the method to win.
    """
    by: dict[tuple[str, int, int], Rows] = {}
    for row in rows_where(rows, what="run"):
        by.setdefault((row["method"], row["layers"], row["seed"]), []).append(row)
    seeds, ways = sorted({seed for *_, seed in by}), {(method, layers): None for method, layers, _ in by}
    depth = max(layers for _, layers in ways)

    def gains(method: str, layers: int, metric: str, knee: float) -> list[float]:
        """Return for each seed how many times full prefill's load the method bears within the objective."""
        ratios = []
        for seed in seeds:
            full = by[FULL, depth, seed]
            objective_ms = knee * full[0][f"alone_{metric}_ms"]
            most = most_qps(by[method, layers, seed], metric, objective_ms)
            ratios.append(most / most_qps(full, metric, objective_ms))
        return ratios

    summary = Summary()
    pairs = [layers for method, layers in ways for _ in by[method, layers, seeds[0]][0]["runs"] if method == PARTIAL]
    for metric in ("ttft", "e2e"):
        alone = [by[FULL, depth, seed][0][f"alone_{metric}_ms"] for seed in seeds]
        bound = {"metric": metric, "objective": KNEE}
        summary.add("objective_ms", bootstrap(np.multiply(KNEE, alone)).summary("ms"), **bound)
        rates = [most_qps(by[FULL, depth, seed], metric, KNEE * ms) for seed, ms in zip(seeds, alone, strict=True)]
        entry = bootstrap(rates).summary("requests/s")
        summary.add("capacity_requests_per_s", entry, method=FULL, layers=depth, **bound)
        for method, layers in ways:
            if method != FULL:
                entry = bootstrap(gains(method, layers, metric, KNEE)).summary("x")
                summary.add("capacity_x", entry, method=method, layers=layers, **bound, than=FULL)
        for knee in (KNEE, *OTHER_KNEES) if pairs else ():
            mean = np.mean([gains(PARTIAL, layers, metric, knee) for layers in pairs], axis=0)
            labels = {"method": PARTIAL, "across": "mean", "metric": metric, "objective": knee, "than": FULL}
            summary.add("capacity_x", bootstrap(mean).summary("x"), **labels)
    return summary
