"""What becomes of a preempted request, who is preempted and who comes back first: CPS's workload on its Table 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from firsttoken.cps.policies import make_policy
from firsttoken.engine.preemption import PREEMPTION, PreemptionPolicy
from firsttoken.engine.preemption.resume import AGED, RESUME, RESUME_ORDERS, ResumeOrder
from firsttoken.engine.preemption.victims import VICTIM, VICTIMS
from firsttoken.engine.schedulers.sarathi import PrefillFirst
from firsttoken.sarathi.checked_scheduler import watched
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.policy_file import PolicyFile, PolicyKind
from firsttoken.study.profile import Profile
from firsttoken_studies.nb22_cross_point_scheduler import study
from firsttoken_studies.trying.table import TrialTable, Values, held

POLICIES = ("swap", "recompute", "cross_point", "online", "oracle")
Options = Callable[[PublishedCosts], dict[str, Any]]  # of one run


def tried_preemption(path: str, profile: Profile, draws: range) -> TrialTable:
    """The last to arrive is preempted, as in the paper."""

    def options(make: Callable[[PublishedCosts], PreemptionPolicy]) -> Options:
        return lambda costs: {"policy": make(costs)}

    siblings = {name: options(study.maker_of(name)) for name in POLICIES}
    return _replayed(path, PREEMPTION, lambda kind: options(lambda costs: kind()), siblings, profile, draws)


def tried_victim(path: str, profile: Profile, draws: range) -> TrialTable:
    """Try the reader's victim rule on replayed conversations; a preempted request comes back by the cross-point."""

    def options(victim: Any) -> Options:
        return lambda costs: {"policy": make_policy("cross_point"), "victim": victim}

    return _replayed(path, VICTIM, options, {name: options(name) for name in VICTIMS}, profile, draws)


def tried_resume(path: str, profile: Profile, draws: range) -> TrialTable:
    """Try the reader's order of coming back, in which any that fits goes ahead of one that does not."""

    def options(order: ResumeOrder) -> Options:
        return lambda costs: {"policy": make_policy("cross_point"), "resume": order}

    siblings = {name: options(order) for name, order in RESUME_ORDERS.items() if name != AGED}
    return _replayed(path, RESUME, lambda turn: options(ResumeOrder(lambda *_: True, turn)), siblings, profile, draws)


def _replayed(
    path: str,
    kind: PolicyKind,
    options: Callable[[Any], Options],
    siblings: dict[str, Options],
    profile: Profile,
    draws: range,
) -> TrialTable:
    file, config = PolicyFile.read(Path(path), kind), profile.section("replayed", study.ReplayedConfig)
    loads = {seed: study.drawn(config, seed) for seed in draws}
    costs = PublishedCosts(decode_s=study.calibrated([loads[draws[0]]], config.blocks))
    fixed_scheduler = watched(PrefillFirst, file.file, file.decisions)  # a victim that is always the same never ends

    def one(settings: Options, seed: int) -> Values:
        run = study.run_replayed(loads[seed], costs, blocks=config.blocks, **settings(costs))
        return {
            "mean TTFT, s": run["mean_ttft_ms"] / 1e3,
            "mean TPOT, ms": run["mean_tpot_ms"],
            "P99 TPOT, ms": run["p99_tpot_ms"],
            "recoveries, s": run["recovery_s"],
            "preemptions": float(run["preemptions"]),
        }

    own_factory = options(file.watched())
    setting = (
        f"{config.short} short and {config.long} long conversations at once into {config.blocks} blocks of 16 tokens, "
        "replayed on CPS Table 2"
    )
    own_row = (path, lambda costs: own_factory(costs) | {"scheduler": fixed_scheduler}, file.judged)
    return TrialTable(setting, held(own_row, siblings, one, draws))
