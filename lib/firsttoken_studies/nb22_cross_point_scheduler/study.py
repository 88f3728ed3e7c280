"""The cross-point policy against the others on the paper's own costs (CPS Figure 2): replayed, by the engine itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from firsttoken.assets.needs import Need, check
from firsttoken.cps.policies import CrossPoint, make_policy
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.costs.fitted import FittedCosts, StepSample, SwapSample, fit_costs
from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption import PREEMPTION, PreemptionPolicy
from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.preemption.resume import ResumeOrder
from firsttoken.engine.preemption.victims import VICTIM, Victim, victim_named
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.trace import Trace
from firsttoken.engine.workload_items import Item, with_ids
from firsttoken.simulation.costs.published import PAPER_SHAPE, PublishedCosts, decomposed
from firsttoken.simulation.workload.sharegpt import LONGEST, threshold_mix
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.policy_file import PolicyFile
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import Interval, bootstrap, share_below
from firsttoken.study.summary import Summary
from firsttoken_studies.cps.assumed_costs import CopyCosts
from firsttoken_studies.cps.live_loads import BLOCK_TOKENS, POOL, LiveLoadsConfig, served
from firsttoken_studies.nb21_swap_or_recompute.study import LONG, PCIE_4_X16
from firsttoken_studies.record.results import Outcome, Result, Rows, frame_of, rows_where

PAPER_TPOT_MS = 36.55  # mean TPOT of CPS (4.2.2), to which the price of a decode step is set
SOURCE = "ShareGPT lengths on the costs of CPS Table 2; no model runs"
BOUND = "bound"  # policy and costs of a row that no run made


def least_mean_ttft_s(items: Sequence[Item], blocks: int, step_s: float) -> float:
    """A bound on the mean TTFT of requests that all arrive at once, whatever the policy, where a step takes ``step_s``.

    A request holds prompt + k tokens in its k-th step, and a pool of C tokens serves at most C token-steps a step, so
    the i-th request to end cannot end before the i smallest needs are served. A mean TTFT is the mean end less the mean
    time from first token to last, taken as a step for each token between them: ``step_s`` is the TPOT, and a request
    that waits between two tokens has a longer one. Shorter steps with long waits in between lower the bound.
    """
    capacity = blocks * PAPER_SHAPE.block_tokens
    needs = sorted(sum(range(item.prompt_tokens, item.total_tokens)) for item in items)
    end_s = np.cumsum(needs) / capacity
    return max(0.0, float(end_s.mean() - np.mean([item.output_tokens - 1 for item in items]))) * step_s


class Inverse(PreemptionPolicy):
    """The paper's rule inverted, which nobody would run: it shows what a gain is owed to.

    The rule recomputes up to ``threshold`` tokens, and swaps above.
    """

    name = "inverse"

    def __init__(self, threshold: float = 1024) -> None:
        self.threshold = threshold

    def choose(self, tokens: int, now_s: float) -> Action:
        return Action.RECOMPUTE if tokens <= self.threshold else Action.SWAP


class Coin(PreemptionPolicy):
    """A control that swaps or recomputes by the toss of a coin, whatever the length."""

    name = "coin"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, tokens: int, now_s: float) -> Action:
        return self._random.choice((Action.SWAP, Action.RECOMPUTE))


MEANS = {  # over runs: measure -> column of the rows, statistic, unit
    "ttft_mean_ms": ("mean_ttft_ms", "mean", "ms"),
    "tpot_mean_ms": ("mean_tpot_ms", "mean", "ms"),
    "tpot_p99_ms": ("p99_tpot_ms", "mean", "ms"),
    "recovery_s": ("recovery_s", "mean", "s"),
    "preemptions": ("preemptions", "mean", ""),
}
OFF = {"ttft_mean_off_pct": "mean_ttft_ms", "tpot_mean_off_pct": "mean_tpot_ms", "tpot_p99_off_pct": "p99_tpot_ms"}


@dataclass(frozen=True)
class LivePoliciesConfig(LiveLoadsConfig):
    """``policies`` run in random order, each on every draw. ``model`` overrides the profile's ("" keeps it)."""

    model: str
    policies: tuple[str, ...]

    section = "live_policies"


def crosspoint_live(profile: Profile) -> Outcome:
    """Rows {seed, policy, run: live | simulated, metrics}.

    The costs are fitted to the live runs of the first draw (of an extra one, where there is one draw only) and foretell
    the others: the simulator is the same engine on a cost model.
    """
    config = profile.section("live_policies", LivePoliciesConfig)
    loaded = config.load(profile, config.model or profile.model)
    loads = config.loads(loaded, range(profile.seed, profile.seed + config.seeds + 1))
    fitting, *others = loads
    with closing(config.executor(loaded)) as executor:
        traces = [_run(executor, loads[fitting], name, config)[1] for name in ("recompute", "swap")]
        costs = fit_costs(*samples(traces))
        rows = _compare(executor, costs, {seed: loads[seed] for seed in others}, config, profile.seed)
    return Outcome(rows, provenance=loaded.provenance.as_dict() | {"costs": asdict(costs)})


def samples(traces: Sequence[Trace]) -> tuple[list[StepSample], list[SwapSample]]:
    """Return the samples that the fit of a cost model takes from engines' traces. The first step of a run warms up and
    is left out."""
    steps = [StepSample(step.prefills, step.contexts, step.seconds) for trace in traces for step in trace.steps[1:]]
    recoveries = [recovery for trace in traces for recovery in trace.recoveries if recovery.action is Action.SWAP]
    return steps, [
        SwapSample(recovery.tokens, recovery.out_s, recovery.prep_s + recovery.in_s) for recovery in recoveries
    ]


def _compare(
    executor: LiveExecutor, costs: FittedCosts, loads: dict[int, Sequence[Item]], config: LivePoliciesConfig, seed: int
) -> Rows:
    cases = list(product(loads, config.policies))
    random.Random(seed).shuffle(cases)
    rows = []
    for number, name in track(cases, desc="live policies"):
        simulated = SimulatedExecutor(costs, executor.blocks, host_blocks=executor.host_pool.blocks)
        for run, source in (("live", executor), ("simulated", simulated)):
            metrics, _ = _run(source, loads[number], name, config)
            rows.append({"seed": number, "policy": name, "run": run} | metrics)
    return rows


def _run(executor: Executor, items: Sequence[Item], name: str, config: LiveLoadsConfig) -> tuple[dict[str, Any], Trace]:
    metrics, _, trace = served(executor, EngineConfig(watermark=0.0), config.policy(name), items)
    return metrics, trace


def live_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Means of the live runs, and how far the simulated ones are off, by metric: the mean over runs and the worst."""
    summary, live = Summary(), frame_of(rows, run="live")
    for policy in parameters["live_policies"]["policies"]:
        summary.by(live[live.policy == policy], {"policy": "policy"}, MEANS)
    both = live.merge(frame_of(rows, run="simulated"), on=["seed", "policy"], suffixes=("", "_simulated"))
    for measure, name in OFF.items():
        off = 100 * (both[f"{name}_simulated"] / both[name] - 1).abs()
        worst = {"value": off.max(), "n": len(off), "unit": "%"}
        summary.add(measure, bootstrap(off).summary("%"), source="simulated", than="live", across="mean")
        summary.add(measure, worst, source="simulated", than="live", across="worst")
    return summary


COMPARED = ("swap", "recompute", "cross_point")  # in Figure 2; they run always
CONTROLS = ("inverse", "coin", "swap_overtaking")
OTHERS = ("bandwidth_only", "online", "oracle", *CONTROLS)
BELOW = {  # measure -> column of the rows
    "ttft_mean_below_pct": "mean_ttft_ms",
    "tpot_mean_below_pct": "mean_tpot_ms",
    "tpot_p99_below_pct": "p99_tpot_ms",
    "recovery_below_pct": "recovery_s",
}
HOST_BLOCKS = 1 << 20  # the paper does not state the swap space (errata I19); here it never fills
OWN = ".py"  # ends the path of a file of one's own
OVERTAKING = "_overtaking"  # ends the name of a policy whose swapped requests may overtake each other
AS_PUBLISHED = "cross_point as published"  # what Swap with coalesced copies is held against
FLOP_PER_TOKEN, A6000_FLOP_PER_S = 0.72e9, 155e12  # Qwen2.5-0.5B without embeddings; dense fp16 of an RTX A6000


@dataclass(frozen=True)
class ReplayedConfig:
    """``seeds`` draws of ``short`` + ``long`` conversations, all at once into ``blocks`` KV blocks of 16 tokens.

    ``thresholds`` are swept; ``decode_ms`` are other prices of a decode step than the calibrated one. CrossPoint swaps
    up to ``threshold`` tokens, and ``policies`` run beside it, Swap and Recompute; ``victim`` says who is preempted. Of
    both one may be the path of a file of one's own.
    """

    seeds: int
    short: int
    long: int
    blocks: int
    thresholds: tuple[int, ...]
    decode_ms: tuple[float, ...]
    threshold: float = 1024
    policies: tuple[str, ...] = OTHERS
    victim: str = "last_arrived"

    def __post_init__(self) -> None:
        if min(self.seeds, self.short, self.long, self.blocks) < 1:
            raise ProfileError("replayed: seeds, short, long and blocks must be at least 1")
        if unknown_policy := next(
            (name for name in self.policies if not name.endswith(OWN) and name not in OTHERS), ""
        ):
            raise ProfileError(
                f"replayed.policies: no policy {unknown_policy!r}; {unknown(unknown_policy, OTHERS)}, or a file"
            )
        if not self.victim.endswith(OWN):
            victim_named(self.victim)

    def needs(self) -> list[Need]:
        """Require a pool that holds the longest conversation, and a request as long as the highest threshold."""
        mend = "raise replayed.blocks"
        return [
            Need("replayed.blocks", LONGEST, POOL, mend),
            Need("replayed.thresholds", max(self.thresholds, default=0), POOL, f"lower it, or {mend}"),
        ]


def crosspoint_replayed(profile: Profile, *, policy: type[PreemptionPolicy] = CrossPoint) -> Outcome:
    """Rows {seed, policy, costs, decode_ms, metrics}: every policy on the same workloads and costs.

    And a row for each workload with the least mean TTFT that any policy could have: policy and costs are "bound".
    ``policy`` is the class that is called CrossPoint, made with a ``threshold``: a reader's in place of the library's.
    """
    config = profile.section("replayed", ReplayedConfig)
    check(config.needs(), {POOL: config.blocks * BLOCK_TOKENS}, context="the replayed engine")
    loads = [drawn(config, profile.seed + number) for number in range(config.seeds)]
    policy_files = {name: PolicyFile.read(Path(name), PREEMPTION) for name in config.policies if name.endswith(OWN)}
    chosen = PolicyFile.read(Path(config.victim), VICTIM) if config.victim.endswith(OWN) else None
    victim = chosen.watched() if chosen else config.victim
    decode_s = calibrated(loads[: min(3, len(loads))], config.blocks)
    cases = list(_cases(config, decode_s, {name: file.watched() for name, file in policy_files.items()}, policy))
    rows = []
    for number, items in enumerate(track(loads, desc="replay")):
        seed = {"seed": profile.seed + number}
        least_s = least_mean_ttft_s(items, config.blocks, PAPER_TPOT_MS / 1e3)
        bound = {"costs": BOUND, "policy": BOUND, "decode_ms": PAPER_TPOT_MS, "mean_ttft_ms": least_s * 1e3}
        rows.append(seed | bound)
        for case, costs, made in cases:
            resume = "any_that_fits" if case["policy"].endswith(OVERTAKING) else "in_order"
            with ExitStack() as judged:
                for file in filter(None, (chosen, policy_files.get(case["policy"]))):
                    judged.enter_context(file.judged())
                rows.append(seed | case | run_replayed(items, costs, made(costs), config.blocks, resume, victim))
    why = f"what {config.blocks} blocks of 16 tokens can hold, shortest requests first, {PAPER_TPOT_MS} ms a step"
    floors = {"mean_ttft": {"value": float(np.mean(column(rows, BOUND, "mean_ttft_ms"))), "unit": "ms", "why": why}}
    return Outcome(rows, floors, provenance={"source": SOURCE, "kind": "replayed"})


def run_replayed(
    items: Sequence[Item],
    costs: Costs,
    policy: PreemptionPolicy,
    blocks: int,
    resume: str | ResumeOrder = "in_order",
    victim: str | Victim = "last_arrived",
    scheduler: str | type[Scheduler] = "prefill_first",
) -> dict[str, Any]:
    """One run of the paper's set-up (3.1, 4.1): prefill-first, LIFO, watermark off; or of another ``victim``."""
    executor = SimulatedExecutor(costs, blocks, host_blocks=HOST_BLOCKS)
    bounds = {"watermark": 0.0, "prefill_tokens": 2560, "token_budget": 1 << 20, "resume": resume}
    return served(executor, EngineConfig(scheduler=scheduler, victim=victim, **bounds), policy, items)[0]


def tails_below_swap(recorded: Result, policy: PreemptionPolicy) -> dict[str, dict[str, Any]]:
    """By how much the P99 TPOT of CrossPoint ("cross_point") and of a ``policy`` ("changed") lies below Swap's.

    Workloads, blocks and price of a decode step are those of ``recorded``, a result of ``crosspoint_replayed``, whose
    own runs of Swap and CrossPoint are read and not repeated. Each value is an entry of a summary, in percent.
    """
    config = ReplayedConfig(**recorded.parameters["replayed"])
    decode_ms = recorded.summary.value("decode_ms")
    rows = rows_where(recorded.rows, costs="published", decode_ms=decode_ms)
    costs = PublishedCosts(decode_s=decode_ms / 1e3)
    for row in track(rows_where(rows, policy="swap"), desc="workloads"):
        measured = run_replayed(drawn(config, row["seed"]), costs, policy, config.blocks)
        rows.append({"seed": row["seed"], "policy": "changed"} | measured)
    return {name: below(rows, name, "swap", "p99_tpot_ms").summary("%", 100) for name in ("cross_point", "changed")}


def calibrated(loads: Sequence[Sequence[Item]], blocks: int) -> float:
    """Seconds of a decode step with which CPS has the paper's mean TPOT: the one number that Table 2 lacks.

    TPOT is the step plus stalls that hardly depend on it, so that a few secant steps find it.
    """
    target, guess = PAPER_TPOT_MS / 1e3, PAPER_TPOT_MS / 1e3
    for _ in range(4):
        costs = PublishedCosts(decode_s=guess)
        runs = [run_replayed(items, costs, make_policy("cross_point"), blocks) for items in loads]
        guess *= target / (float(np.mean([run["mean_tpot_ms"] for run in runs])) / 1e3)
    return guess


def drawn(config: ReplayedConfig, seed: int) -> tuple[Item, ...]:
    """Return the workload drawn by ``seed``."""
    return with_ids(threshold_mix(None, config.short, config.long, seed=seed), vocabulary=1)


def _cases(
    config: ReplayedConfig,
    decode_s: float,
    policy_files: Mapping[str, Callable[[], PreemptionPolicy]],
    cross_point: type[PreemptionPolicy],
) -> Iterable[tuple[dict[str, Any], Costs, Callable[[Costs], PreemptionPolicy]]]:
    """(columns, costs, policy) of every case: policies, thresholds, other decode prices, coalesced copies."""
    published = PublishedCosts(decode_s=decode_s)
    base = {"costs": "published", "decode_ms": decode_s * 1e3}
    for name in (*COMPARED, *config.policies):
        kind = policy_files.get(name)
        maker = maker_of(name, config.threshold, cross_point) if kind is None else lambda costs, kind=kind: kind()
        yield base | {"policy": name}, published, maker
    for threshold in config.thresholds:
        named = base | {"policy": f"threshold_{threshold}", "threshold": threshold}
        yield named, published, lambda costs, t=threshold: cross_point(threshold=t)
    parts = decomposed(LONG, PCIE_4_X16)
    coalesced = CopyCosts(published, PAPER_SHAPE, parts.out_us_per_copy / 1e6, PCIE_4_X16, coalesced=True)
    for name in ("swap", "cross_point", "swap_overtaking"):
        yield base | {"costs": "coalesced", "policy": name}, coalesced, maker_of(name, config.threshold, cross_point)
    for other_ms, name in product(config.decode_ms, COMPARED):
        columns = {"costs": "published", "decode_ms": other_ms, "policy": name}
        yield columns, PublishedCosts(decode_s=other_ms / 1e3), maker_of(name, config.threshold, cross_point)


def maker_of(
    name: str, threshold: float = 1024, cross_point: type[PreemptionPolicy] = CrossPoint
) -> Callable[[Costs], PreemptionPolicy]:
    """Return a function that makes the policy called ``name`` for the costs of a run."""
    if name == "oracle":
        return lambda costs: make_policy(name, costs_at=lambda now_s: costs)
    if name == "bandwidth_only":
        theory = {"bytes_per_token": PAPER_SHAPE.bytes_per_token, "bytes_per_s": PCIE_4_X16}
        theory |= {"flop_per_token": FLOP_PER_TOKEN, "flop_per_s": A6000_FLOP_PER_S}
        return lambda costs: make_policy(name, **theory)
    if name in ("inverse", "coin"):
        return lambda costs: {"inverse": Inverse, "coin": Coin}[name]()
    if name == "cross_point":
        return lambda costs: cross_point(threshold=threshold)
    return lambda costs: make_policy(name.removesuffix(OVERTAKING))


def replayed_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Means by policy, and by how much CPS lies below each static policy, paired by workload."""
    moved = rows_where(rows, costs="coalesced")
    decode_ms = moved[0]["decode_ms"]  # the calibrated price, as in every row but those of other prices
    main = rows_where(rows, costs="published", decode_ms=decode_ms)
    summary = Summary()
    summary.add("decode_ms", {"value": decode_ms, "unit": "ms"})
    least = column(rows, BOUND, "mean_ttft_ms")
    summary.add("ttft_mean_ms", bootstrap(least, "mean").summary("ms"), policy=BOUND)
    for policy, threshold in {row["policy"]: row.get("threshold") for row in main}.items():
        labels = {"policy": "threshold", "threshold_tokens": threshold} if threshold is not None else {"policy": policy}
        runs_of_policy = frame_of(main, policy=policy).sort_values("seed", kind="stable")
        summary.by(runs_of_policy, {}, MEANS, **labels, costs="published")

    def gained(measure: str, runs: Rows, policy: str, other: str, costs: str = "published") -> None:
        entry = below(runs, policy, other, BELOW[measure]).summary("%", 100)
        summary.add(measure, entry, policy=policy, than=other, costs=costs)

    for other, measure in product(("swap", "recompute"), BELOW):
        gained(measure, main, "cross_point", other)
    for name, other in product(CONTROLS, ("swap", "cross_point")):
        if column(main, name, "seed"):
            gained("tpot_p99_below_pct", main, name, other)
    as_published = [row | {"policy": AS_PUBLISHED} for row in rows_where(main, policy="cross_point")]
    gained("recovery_below_pct", moved + as_published, "swap", AS_PUBLISHED, "coalesced")
    gained("tpot_p99_below_pct", moved, "cross_point", "swap", "coalesced")
    pairs = np.column_stack([column(main, "cross_point", name) for name in ("recovery_s", "makespan_s")])
    share = bootstrap(pairs, lambda sample: float(np.divide(*sample.sum(0))))
    summary.add("recovery_share_pct", share.summary("%", 100), policy="cross_point", costs="published")
    return summary


def column(rows: Rows, policy: str, name: str) -> list[float]:
    """Return the values of ``name`` in the runs of ``policy``, by seed."""
    return [row[name] for row in sorted(rows_where(rows, policy=policy), key=lambda row: row["seed"])]


def below(rows: Rows, policy: str, other: str, name: str) -> Interval:
    """1 - the mean of ``policy`` over the mean of ``other``; workloads are resampled, each with both its runs."""
    return share_below(column(rows, policy, name), column(rows, other, name))
