"""The same policies live, at a size that fits, and the simulator held against what happened."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.cps.policies import make_policy
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.costs.fitted import FittedCosts, StepSample, SwapSample, fit_costs
from firsttoken.engine.engine import Engine
from firsttoken.engine.executor import Executor
from firsttoken.engine.fused import fuse
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.metrics import client_metrics, recovery_metrics, serve_items
from firsttoken.engine.preemption.base import Action
from firsttoken.engine.preemptor import Recovery
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.trace import Trace
from firsttoken.engine.workload.items import Item, with_ids
from firsttoken.engine.workload.sharegpt import LONGEST, threshold_mix
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap

BLOCK_TOKENS = 16
POOL = "tokens in all of its KV blocks"
MEANS = {  # over runs: measure -> column of the rows, unit
    "ttft_mean_ms": ("mean_ttft_ms", "ms"),
    "tpot_mean_ms": ("mean_tpot_ms", "ms"),
    "tpot_p99_ms": ("p99_tpot_ms", "ms"),
    "recovery_s": ("recovery_s", "s"),
    "preemptions": ("preemptions", ""),
}
OFF = {"ttft_mean_off_pct": "mean_ttft_ms", "tpot_mean_off_pct": "mean_tpot_ms", "tpot_p99_off_pct": "p99_tpot_ms"}


@dataclass(frozen=True)
class LivePoliciesConfig:
    """``short`` + ``long`` conversations of ShareGPT, their lengths times ``scale``, for each of ``seeds`` draws.

    They share ``blocks`` of 16 tokens, with as many host blocks as they could need. ``policies`` run in random order,
    each on every draw, over the swap path ``swap``; the threshold of cross_point is 1,024 x ``scale``. ``model``
    overrides the profile's ("" keeps it).
    """

    model: str
    seeds: int
    short: int
    long: int
    scale: float
    blocks: int
    policies: tuple[str, ...]
    swap: str

    def __post_init__(self) -> None:
        if min(self.seeds, self.short, self.long, self.blocks) < 1:
            raise ProfileError("live_policies: seeds, short, long and blocks must be at least 1")

    def needs(self) -> list[Need]:
        """Context and pool hold the longest conversation, and so the threshold below it."""
        longest = math.ceil(LONGEST * self.scale)
        return [
            Need("live_policies.scale", longest, CONTEXT),
            Need("live_policies.scale", longest, POOL, "lower it, or raise live_policies.blocks"),
        ]


def crosspoint_live(profile: Profile) -> Outcome:
    """Rows {seed, policy, run: live | simulated, metrics}.

    The costs are fitted to the live runs of the first draw (of an extra one, where there is one draw only) and foretell
    the others: the simulator is the same engine on a cost model.
    """
    config = profile.section("live_policies", LivePoliciesConfig)
    check(config.needs(), ModelFacts(config.model or profile.model, {POOL: config.blocks * BLOCK_TOKENS}))
    loaded = load_model(config.model or profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
    fuse(loaded.model)
    vocabulary = loaded.model.config.vocab_size
    loads = {
        seed: with_ids(_mix(config, loaded.tokenizer, seed), vocabulary, seed)
        for seed in range(profile.seed, profile.seed + config.seeds + 1)
    }
    fitting, *others = loads
    executor = LiveExecutor(loaded.model, config.blocks, host_blocks=4 * config.blocks, swap=config.swap)
    try:
        traces = [_run(executor, loads[fitting], name, config)[1] for name in ("recompute", "swap")]
        costs = fit_costs(*samples(traces))
        rows = _compare(executor, costs, {seed: loads[seed] for seed in others}, config, profile.seed)
    finally:
        executor.close()
    return Outcome(rows, provenance=loaded.provenance.as_dict() | {"costs": costs.as_dict()})


def samples(traces: Iterable[Trace]) -> tuple[list[StepSample], list[SwapSample]]:
    """What the fit of a cost model takes, from what engines have seen. First steps of a run are warm-up."""
    steps: list[StepSample] = []
    swaps: list[SwapSample] = []
    for trace in traces:
        steps += [StepSample(step.prefills, step.contexts, step.seconds) for step in trace.steps[1:]]
        swaps += [_swap_sample(recovery) for recovery in trace.recoveries if recovery.action is Action.SWAP]
    return steps, swaps


def _swap_sample(recovery: Recovery) -> SwapSample:
    return SwapSample(recovery.tokens, recovery.out_s, recovery.prep_s + recovery.in_s)


def _compare(
    executor: LiveExecutor, costs: FittedCosts, loads: dict[int, Sequence[Item]], config: LivePoliciesConfig, seed: int
) -> Rows:
    cases = [(number, name) for number in loads for name in config.policies]
    random.Random(seed).shuffle(cases)
    rows = []
    for number, name in tqdm(cases, desc="live policies", disable=None):
        simulated = SimulatedExecutor(costs, executor.blocks, host_blocks=executor.arena.blocks)
        for run, where in (("live", executor), ("simulated", simulated)):
            metrics, _ = _run(where, loads[number], name, config)
            rows.append({"seed": number, "policy": name, "run": run} | metrics)
    return rows


def _run(
    executor: Executor, items: Sequence[Item], name: str, config: LivePoliciesConfig
) -> tuple[dict[str, Any], Trace]:
    trace = Trace()
    policy = make_policy(name, threshold=1024 * config.scale) if name == "cross_point" else make_policy(name)
    engine = Engine(executor, EngineConfig(watermark=0.0), policy=policy, trace=trace)
    requests = serve_items(engine, items)
    return client_metrics(requests) | recovery_metrics(trace), trace


def _mix(config: LivePoliciesConfig, tokenizer: Any | None, seed: int) -> tuple[Item, ...]:
    return threshold_mix(tokenizer, config.short, config.long, scale=config.scale, seed=seed)


def live_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Means of the live runs, and how far the simulated ones are off, by metric: the mean over runs and the worst."""
    summary = Summary()
    live = {(row["seed"], row["policy"]): row for row in rows if row["run"] == "live"}
    simulated = {(row["seed"], row["policy"]): row for row in rows if row["run"] == "simulated"}
    for policy in parameters["live_policies"]["policies"]:
        for measure, (name, unit) in MEANS.items():
            values = [row[name] for (_, which), row in live.items() if which == policy]
            summary.add(measure, bootstrap(values).summary(unit), policy=policy)
    for measure, name in OFF.items():
        off = [100 * abs(simulated[key][name] / row[name] - 1) for key, row in live.items()]
        worst = {"value": max(off), "n": len(off), "unit": "%"}
        summary.add(measure, bootstrap(off).summary("%"), source="simulated", than="live", across="mean")
        summary.add(measure, worst, source="simulated", than="live", across="worst")
    return summary
