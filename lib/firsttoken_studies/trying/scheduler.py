"""Tries a scheduler: one rate of requests on a simulated GPU, held against both objectives (Sarathi-Serve, 5.1)."""

from __future__ import annotations

from firsttoken.sarathi.capacity import RELAXED, STRICT
from firsttoken.sarathi.policy import Policy
from firsttoken.simulation.hardware import Hardware
from firsttoken.study.profile import Profile
from firsttoken_studies.nb41_serving_capacity.bench import Bench, CapacityConfig
from firsttoken_studies.trying.table import TrialTable, Values, held

RATE = 2.0  # requests/s: prefill-first misses the strict objective there, and Sarathi holds it


def tried_scheduler(text: str, profile: Profile, draws: range) -> TrialTable:
    """``text`` is a path, with a token budget behind it if need be, or a name."""
    own_policy, config = Policy.named(text), profile.section("capacity", CapacityConfig)
    bench = Bench(config, profile.section("hardware", Hardware))
    strict, relaxed = bench.objective(STRICT), bench.objective(RELAXED)

    def one(policy: Policy, seed: int) -> Values:
        times, _ = bench.serve(policy, strict, seed, RATE)
        return {
            "median TTFT, s": times.ttft_p50_s,
            "P99 TBT, ms": 1e3 * times.tbt_p99_s,
            "longest gap, ms": 1e3 * times.tbt_max_s,
            f"P99 within {1e3 * strict.tbt_s:.0f} ms, %": 100.0 * times.within(strict),
            f"within {1e3 * relaxed.tbt_s:.0f} ms, %": 100.0 * times.within(relaxed),
        }

    siblings = {name: Policy.named(name) for name in config.schedulers}
    setting = (
        f"{config.requests} requests at {RATE:g} requests/s with the lengths of {config.lengths}, simulated on "
        f"{bench.hardware.costs}"
    )
    return TrialTable(setting, held((text, own_policy, own_policy.judged), siblings, one, draws))
