"""The cross-point policy against the others on the paper's own costs (CPS Figure 2): replayed, by the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from firsttoken.assets.needs import Need, check
from firsttoken.cps.costs.copies import CopyCosts
from firsttoken.cps.policies import make_policy
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.costs.model import Costs
from firsttoken.engine.costs.published import PAPER_SHAPE, PublishedCosts, decomposed
from firsttoken.engine.engine import Engine
from firsttoken.engine.metrics import client_metrics, recovery_metrics, serve_items
from firsttoken.engine.preemption import PREEMPTION, PreemptionPolicy
from firsttoken.engine.schedulers.base import Scheduler
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.trace import Trace
from firsttoken.engine.victims import VICTIM, Victim, victim_named
from firsttoken.engine.workload.items import Item, with_ids
from firsttoken.engine.workload.sharegpt import LONGEST, threshold_mix
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.policy_file import PolicyFile
from firsttoken.study.profile import Profile, unknown
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import Interval, bootstrap
from firsttoken_studies.cps.controls import Coin, Inverse
from firsttoken_studies.cps.least_ttft import BOUND, PAPER_TPOT_MS, bound_row
from firsttoken_studies.cps.policies_live import BLOCK_TOKENS, MEANS, POOL
from firsttoken_studies.cps.recovery_latency import LONG, PCIE_4_X16

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
        if odd := next((name for name in self.policies if not name.endswith(OWN) and name not in OTHERS), ""):
            raise ProfileError(f"replayed.policies: no policy {odd!r}; {unknown(odd, OTHERS)}, or a file")
        if not self.victim.endswith(OWN):
            victim_named(self.victim)

    def needs(self) -> list[Need]:
        """The pool holds the longest conversation, and a request as long as the highest threshold."""
        mend = "raise replayed.blocks"
        return [
            Need("replayed.blocks", LONGEST, POOL, mend),
            Need("replayed.thresholds", max(self.thresholds, default=0), POOL, f"lower it, or {mend}"),
        ]


def crosspoint_replayed(profile: Profile) -> Outcome:
    """Rows {seed, policy, costs, decode_ms, metrics}: every policy on the same workloads and costs.

    And a row for each workload with the least mean TTFT that any policy could have: policy and costs are "bound".
    """
    config = profile.section("replayed", ReplayedConfig)
    check(config.needs(), {POOL: config.blocks * BLOCK_TOKENS}, where="the replayed engine")
    loads = [drawn(config, profile.seed + number) for number in range(config.seeds)]
    own = {name: PolicyFile.read(Path(name), PREEMPTION) for name in config.policies if name.endswith(OWN)}
    chosen = PolicyFile.read(Path(config.victim), VICTIM) if config.victim.endswith(OWN) else None
    victim = chosen.watched() if chosen else config.victim
    decode_s = calibrated(loads[: min(3, len(loads))], config.blocks)
    cases = list(_cases(config, decode_s, {name: file.watched() for name, file in own.items()}))
    rows = []
    for number, items in enumerate(tqdm(loads, desc="replay", disable=None)):
        seed = {"seed": profile.seed + number}
        rows.append(seed | bound_row(items, config.blocks))
        for case, costs, policy in cases:
            overtake = case["policy"].endswith(OVERTAKING)
            with ExitStack() as judged:
                for file in filter(None, (chosen, own.get(case["policy"]))):
                    judged.enter_context(file.judged())
                rows.append(seed | case | run_replayed(items, costs, policy(costs), config.blocks, overtake, victim))
    why = f"what {config.blocks} blocks of 16 tokens can hold, shortest requests first, {PAPER_TPOT_MS} ms a step"
    floors = {"mean_ttft": {"value": float(np.mean(column(rows, BOUND, "mean_ttft_ms"))), "unit": "ms", "why": why}}
    source = "ShareGPT lengths on the costs of CPS Table 2; no model runs"
    return Outcome(rows, floors, provenance={"source": source, "kind": "replayed"})


def run_replayed(
    items: Sequence[Item],
    costs: Costs,
    policy: PreemptionPolicy,
    blocks: int,
    overtake: bool = False,
    victim: str | Victim = "last_arrived",
    scheduler: str | type[Scheduler] = "prefill_first",
) -> dict[str, Any]:
    """One run of the paper's set-up (3.1, 4.1): prefill-first, LIFO, watermark off; or of another ``victim``."""
    trace = Trace()
    executor = SimulatedExecutor(costs, blocks, host_blocks=HOST_BLOCKS)
    bounds = {"watermark": 0.0, "prefill_tokens": 2560, "token_budget": 1 << 20, "overtake": overtake}
    config = EngineConfig(scheduler=scheduler, victim=victim, **bounds)
    requests = serve_items(Engine(executor, config, policy=policy, trace=trace), items)
    return client_metrics(requests) | recovery_metrics(trace)


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
    """The workload of ``seed``."""
    return with_ids(threshold_mix(None, config.short, config.long, seed=seed), vocabulary=1)


def _cases(
    config: ReplayedConfig, decode_s: float, own: Mapping[str, Callable[[], PreemptionPolicy]]
) -> Iterable[tuple[dict[str, Any], Costs, Callable[[Costs], PreemptionPolicy]]]:
    """(columns, costs, policy) of every case: policies, thresholds, other decode prices, coalesced copies."""
    published = PublishedCosts(decode_s=decode_s)
    base = {"costs": "published", "decode_ms": decode_s * 1e3}
    for name in (*COMPARED, *config.policies):
        kind = own.get(name)
        maker = maker_of(name, config.threshold) if kind is None else lambda costs, kind=kind: kind()
        yield base | {"policy": name}, published, maker
    for threshold in config.thresholds:
        named = base | {"policy": f"threshold_{threshold}", "threshold": threshold}
        yield named, published, lambda costs, t=threshold: make_policy("cross_point", threshold=t)
    parts = decomposed(LONG, PCIE_4_X16)
    coalesced = CopyCosts(published, PAPER_SHAPE, parts.out_us_per_copy / 1e6, PCIE_4_X16, coalesced=True)
    for name in ("swap", "cross_point", "swap_overtaking"):
        yield base | {"costs": "coalesced", "policy": name}, coalesced, maker_of(name, config.threshold)
    for other_ms in config.decode_ms:
        for name in COMPARED:
            columns = {"costs": "published", "decode_ms": other_ms, "policy": name}
            yield columns, PublishedCosts(decode_s=other_ms / 1e3), maker_of(name, config.threshold)


def maker_of(name: str, threshold: float = 1024) -> Callable[[Costs], PreemptionPolicy]:
    """Makes the policy of that name for the costs of a run."""
    if name == "oracle":
        return lambda costs: make_policy(name, costs_at=lambda now_s: costs)
    if name == "bandwidth_only":
        theory = (PAPER_SHAPE.bytes_per_token, PCIE_4_X16, FLOP_PER_TOKEN, A6000_FLOP_PER_S)
        names = ("bytes_per_token", "bytes_per_s", "flop_per_token", "flop_per_s")
        return lambda costs: make_policy(name, **dict(zip(names, theory, strict=True)))
    if name in ("inverse", "coin"):
        return lambda costs: {"inverse": Inverse, "coin": Coin}[name]()
    if name == "cross_point":
        return lambda costs: make_policy(name, threshold=threshold)
    return lambda costs: make_policy(name.removesuffix(OVERTAKING))


def replayed_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Means by policy, and by how much CPS lies below each static policy, paired by workload."""
    moved = [row for row in rows if row["costs"] == "coalesced"]
    decode_ms = moved[0]["decode_ms"]  # the calibrated price, as in every row but those of other prices
    main = [row for row in rows if row["costs"] == "published" and row["decode_ms"] == decode_ms]
    summary = Summary()
    summary.add("decode_ms", {"value": decode_ms, "unit": "ms"})
    least = column(rows, BOUND, "mean_ttft_ms")
    summary.add("ttft_mean_ms", {"value": float(np.mean(least)), "n": len(least), "unit": "ms"}, policy=BOUND)
    for policy, threshold in {row["policy"]: row.get("threshold") for row in main}.items():
        place = {"policy": "threshold", "threshold_tokens": threshold} if threshold is not None else {"policy": policy}
        for measure, (name, unit) in MEANS.items():
            summary.add(measure, bootstrap(column(main, policy, name)).summary(unit), **place, costs="published")

    def gained(measure: str, runs: Rows, policy: str, other: str, costs: str = "published") -> None:
        entry = below(runs, policy, other, BELOW[measure]).summary("%", 100)
        summary.add(measure, entry, policy=policy, than=other, costs=costs)

    for other in ("swap", "recompute"):
        for measure in BELOW:
            gained(measure, main, "cross_point", other)
    for name in (name for name in CONTROLS if column(main, name, "seed")):
        for other in ("swap", "cross_point"):
            gained("tpot_p99_below_pct", main, name, other)
    as_published = [row | {"policy": AS_PUBLISHED} for row in main if row["policy"] == "cross_point"]
    gained("recovery_below_pct", moved + as_published, "swap", AS_PUBLISHED, "coalesced")
    gained("tpot_p99_below_pct", moved, "cross_point", "swap", "coalesced")
    pairs = np.column_stack([column(main, "cross_point", name) for name in ("recovery_s", "makespan_s")])
    share = bootstrap(pairs, lambda sample: float(np.divide(*sample.sum(0))))
    summary.add("recovery_share_pct", share.summary("%", 100), policy="cross_point", costs="published")
    return summary


def column(rows: Rows, policy: str, name: str) -> list[float]:
    """``name`` of the runs of ``policy``, by seed."""
    return [row[name] for row in sorted(rows, key=lambda row: row["seed"]) if row["policy"] == policy]


def below(rows: Rows, policy: str, other: str, name: str) -> Interval:
    """1 - the mean of ``policy`` over the mean of ``other``; workloads are resampled, each with both its runs."""
    pairs = np.column_stack([column(rows, policy, name), column(rows, other, name)])
    return bootstrap(pairs, lambda sample: float(1 - np.divide(*sample.mean(0))))
