"""Hundreds of joins, leaves and deaths: how soon a swarm is back at 90 % of what its servers could, by rule."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from firsttoken.petals.fewest_moves import FewestMoves
from firsttoken.petals.placement import Rebalancing
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile, unknown
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.petals.churn import Churn, ChurnConfig

RULES: dict[str, dict[str, Any]] = {
    "paper": {"rule": Rebalancing()},
    "fewest": {"rule": FewestMoves(), "hears_s": 30.0},
}
SHARE = 0.9  # of what no placement can exceed
_KINDS = ((4, 1.0), (5, 1.6), (6, 2.0), (8, 2.5), (10, 3.0))  # blocks, tokens a second through them


@dataclass(frozen=True)
class ChurnStudyConfig:
    """``servers`` of five kinds over ``depth`` blocks; after each of ``events`` (one to three leave, die or join at
    once) two periods of quiet; by each of ``rules`` and for each of ``seeds`` draws. ProfileError for what is none."""

    servers: int
    depth: int
    events: int
    seeds: int
    period_s: float
    rules: tuple[str, ...]

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule not in RULES:
                raise ProfileError(f"churn.rules: no rule {rule!r}; {unknown(rule, RULES)}")
        if min(self.servers, self.events, self.seeds) < 1 or self.depth < max(blocks for blocks, _ in _KINDS):
            raise ProfileError("churn: servers, events and seeds must be at least 1, depth at least 10")


def swarm_churn(profile: Profile) -> Outcome:
    """Rows {seed, rule, event, kind, servers, back_s, unserved_s, share_after, moves, in_vain}; ``back_s`` is
    None where the rate was not back after two periods."""
    config = profile.section("churn", ChurnStudyConfig)
    rows: Rows = []
    asked = itertools.product(range(profile.seed, profile.seed + config.seeds), config.rules)
    for seed, rule in tqdm(list(asked), desc="churn", disable=None):
        rows += [{"seed": seed, "rule": rule} | row for row in churned(config, seed, RULES[rule])]
    return Outcome(rows, provenance={"source": "simulated servers", "kind": "simulated"})


def churned(config: ChurnStudyConfig, seed: int, rule: Mapping[str, Any]) -> Rows:
    """One swarm from its growth through all events, by the settings ``rule`` of ``ChurnConfig``; the draws are the same
    for every rule."""
    rng = np.random.default_rng(seed)
    churn = Churn(ChurnConfig(config.depth, config.period_s, **rule), seed)
    names = (f"s{number:05}" for number in itertools.count())

    def join() -> None:
        blocks, rate = _KINDS[rng.integers(len(_KINDS))]
        churn.join(next(names), blocks, blocks * rate)

    for _ in range(config.servers):
        join()
        churn.run(churn.now_s + 5)
    churn.run(churn.now_s + 4 * config.period_s)
    rows: Rows = []
    for event in range(config.events):
        at, before, moves, vain = churn.now_s, len(churn.history) - 1, churn.moves, churn.in_vain
        living, count = [one.name for one in churn.living], int(rng.integers(1, 4))
        kind = ("leave", "die", "join")[rng.integers(3)] if len(living) > 0.75 * config.servers else "join"
        kind = "leave" if len(living) > 1.25 * config.servers else kind
        for name in [None] * count if kind == "join" else rng.choice(living, count, replace=False):
            if name is None:
                join()
            else:
                churn.leave(str(name), says_so=kind == "leave")
        churn.run(at + 2 * config.period_s)
        until = _until(churn.history[before + 1 :], at, churn.now_s)
        row = {"event": event, "kind": kind, "servers": len(churn.living), **until}
        row |= {"moves": churn.moves - moves, "in_vain": churn.in_vain - vain}
        rows.append(row)
    return rows


def _until(history: list[tuple[float, float, float, int]], at_s: float, end_s: float) -> dict[str, float | None]:
    """From ``at_s`` on: seconds until the rate is back for good, until no block is unserved, the share at the end."""
    ends = [*(moment for moment, *_ in history[1:]), end_s]
    low = [end for end, (_, rate, most, _) in zip(ends, history, strict=True) if rate < SHARE * most]
    unserved = [end for end, (*_, gaps) in zip(ends, history, strict=True) if gaps]
    back = (low[-1] if low else at_s) - at_s
    return {
        "back_s": back if back < end_s - at_s else None,
        "unserved_s": (unserved[-1] if unserved else at_s) - at_s,
        "share_after": history[-1][1] / history[-1][2],
    }


def churn_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By rule: events after which the rate is back within a period, the share that it comes to, the longest gap, moves
    an event, and moves in vain."""
    summary, period = Summary(), parameters["churn"]["period_s"]
    for rule in dict.fromkeys(row["rule"] for row in rows):
        here = [row for row in rows if row["rule"] == rule]
        back = [row["back_s"] is not None and row["back_s"] <= period for row in here]
        longest, in_vain = max(row["unserved_s"] for row in here) / period, sum(row["in_vain"] for row in here)
        share = bootstrap([row["share_after"] for row in here]).summary("%", 100)
        summary.add("back_within_a_period_pct", bootstrap(back).summary("%", 100), variant=rule)
        summary.add("share_after_pct", share, variant=rule)
        summary.add("moves_an_event", bootstrap([row["moves"] for row in here]).summary(), variant=rule)
        summary.add("longest_unserved_periods", {"value": longest, "n": len(here)}, variant=rule)
        summary.add("moves_in_vain", {"value": in_vain, "n": len(here)}, variant=rule)
    return summary
