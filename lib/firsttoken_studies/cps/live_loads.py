"""Conversations for which blocks are too few, on this machine: how they are drawn, and one run of the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from firsttoken.assets.models import Loaded, load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.cps.policies import make_policy
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption import Action, PreemptionPolicy
from firsttoken.engine.request import Request
from firsttoken.engine.trace import Trace
from firsttoken.engine.workload_items import Item, serve_items, with_ids
from firsttoken.simulation.workload.sharegpt import LONGEST, threshold_mix
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile

BLOCK_TOKENS = 16
POOL = "tokens in all of its KV blocks"


@dataclass(frozen=True)
class LiveLoadsConfig:
    """``short`` + ``long`` conversations of ShareGPT, their lengths times ``scale``, for each of ``seeds`` draws.

    They share ``blocks`` of 16 tokens, with as many host blocks as they could need, over the swap path ``swap``. The
    threshold of cross_point is 1,024 x ``scale``.
    """

    seeds: int
    short: int
    long: int
    scale: float
    blocks: int
    swap: str

    section: ClassVar[str]

    def __post_init__(self) -> None:
        if min(self.seeds, self.short, self.long, self.blocks) < 1:
            raise ProfileError(f"{self.section}: seeds, short, long and blocks must be at least 1")

    def needs(self) -> list[Need]:
        """Require a context and a pool that hold the longest conversation, and so the threshold below it."""
        scale, longest = f"{self.section}.scale", math.ceil(LONGEST * self.scale)
        mend = f"lower it, or raise {self.section}.blocks"
        return [Need(scale, longest, CONTEXT), Need(scale, longest, POOL, mend)]

    def policy(self, name: str) -> PreemptionPolicy:
        """Return the policy called ``name``."""
        return make_policy(name, **({"threshold": 1024 * self.scale} if name == "cross_point" else {}))

    def loads(self, loaded: Loaded, seeds: Iterable[int]) -> dict[int, tuple[Item, ...]]:
        """The conversations of each draw, in tokens of the model."""
        vocabulary, lengths = loaded.model.config.vocab_size, (self.short, self.long)
        mixed = {seed: threshold_mix(loaded.tokenizer, *lengths, scale=self.scale, seed=seed) for seed in seeds}
        return {seed: with_ids(items, vocabulary, seed) for seed, items in mixed.items()}

    def load(self, profile: Profile, name: str) -> Loaded:
        """Load the model called ``name``, its projections fused. Raises ProfileError for one that is too small."""
        check(self.needs(), ModelFacts(name, {POOL: self.blocks * BLOCK_TOKENS}))
        loaded = load_model(name, dtype=profile.torch_dtype(), device=profile.torch_device())
        fuse(loaded.model)
        return loaded

    def executor(self, loaded: Loaded) -> LiveExecutor:
        """Return the executor that runs the conversations on the model."""
        return LiveExecutor(loaded.model, self.blocks, host_blocks=4 * self.blocks, swap=self.swap)


def served(
    executor: Executor, settings: EngineConfig, policy: PreemptionPolicy, items: Sequence[Item]
) -> tuple[dict[str, Any], list[Request], Trace]:
    """One run: its metrics, the requests as they were served, and what the engine has seen."""
    trace = Trace()
    requests = serve_items(Engine(executor, settings, policy=policy, trace=trace), items)
    return _client_metrics(requests) | _recovery_metrics(trace), requests, trace


def _client_metrics(requests: Sequence[Request]) -> dict[str, float]:
    """Mean TTFT, and mean and P99 over requests of TPOT (CPS 4.2.2), in ms; requests of one token have no TPOT."""
    ttft = [request.ttft_s for request in requests]
    tpot = [seconds for request in requests if (seconds := request.tpot_s) is not None]
    return {
        "mean_ttft_ms": float(np.mean(ttft)) * 1e3,
        "mean_tpot_ms": float(np.mean(tpot)) * 1e3,
        "p99_tpot_ms": float(np.percentile(tpot, 99)) * 1e3,
        "makespan_s": max(request.times_s[-1] for request in requests) - min(r.arrival_s for r in requests),
    }


def _recovery_metrics(trace: Trace) -> dict[str, Any]:
    """Count the preemptions and the ways in which requests came back, with the seconds that took."""
    actions = [recovery.action for recovery in trace.recoveries]
    return {
        "preemptions": len(actions),
        "swapped": actions.count(Action.SWAP),
        "host_full": sum(recovery.reason == "host pool full" for recovery in trace.recoveries),
        "recovery_s": sum(recovery.cost_s for recovery in trace.recoveries),
    }
