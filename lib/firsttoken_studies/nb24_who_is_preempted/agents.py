"""Who is preempted, and what becomes of idle blocks, where agents wait for tools between their turns."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from firsttoken.cps.policies import make_policy
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.request import Kind, Request
from firsttoken.engine.sessions import IDLE_RULES, AgentSession, Turn, serve_sessions
from firsttoken.engine.simulated import SimulatedExecutor, without_garbage_collection
from firsttoken.engine.workload_items import Arrivals
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, share_below
from firsttoken.study.summary import Summary
from firsttoken_studies.nb24_who_is_preempted.cards import COSTS, costs_on
from firsttoken_studies.nb24_who_is_preempted.study import check_rules, victim_of
from firsttoken_studies.record.results import Outcome, Rows

TOOLS = ("short", "long", "mixed")
MOST_S = 20.0
BASE = "last_admitted cache"  # vLLM's defaults


@dataclass(frozen=True)
class IdleAgentsConfig:
    """``seeds`` draws from ``first_seed`` on, each of ``sessions`` agents that come at ``rate_per_s`` as a Poisson
    process into ``blocks`` KV blocks of 16 tokens. An agent has between the two of ``turns`` turns; the tokens of its
    first prompt, of what a tool returns and of an answer are drawn evenly between the two of ``prompt``, ``returned``
    and ``answer``. On each of ``cards``, each of ``victims`` runs with each rule of ``idle`` under each kind of
    ``tools``."""

    first_seed: int
    seeds: int
    sessions: int
    rate_per_s: float
    blocks: int
    turns: tuple[int, int]
    prompt: tuple[int, int]
    returned: tuple[int, int]
    answer: tuple[int, int]
    cards: tuple[str, ...]
    tools: tuple[str, ...]
    victims: tuple[str, ...]
    idle: tuple[str, ...]

    def __post_init__(self) -> None:
        for low, high in (self.turns, self.prompt, self.returned, self.answer):
            if not 1 <= low <= high:
                raise ProfileError(f"league_agents: a range is two numbers from 1 on, the lower first: {low}, {high}")
        if min(self.seeds, self.sessions) < 1 or self.rate_per_s <= 0:
            raise ProfileError("league_agents: seeds and sessions must be at least 1, and rate_per_s above 0")
        longest = self.prompt[1] + self.turns[1] * (self.returned[1] + self.answer[1])
        if 2 * longest > 16 * self.blocks:
            raise ProfileError(f"league_agents: {self.blocks} blocks hold less than two long sessions; give more")
        check_rules(self.victims, (), ())
        for names, choices in ((self.tools, TOOLS), (self.idle, IDLE_RULES), (self.cards, COSTS)):
            if absent := next((name for name in names if name not in choices), ""):
                raise ProfileError(f"league_agents: no {absent!r}; {unknown(absent, choices)}")


def tool_times_s(kind: str, draw: random.Random) -> tuple[float, float]:
    """Seconds that a tool takes, and those that one of its kind takes in the mean.

    The short and the long ones are distributed as in InferCept's benchmark: a gamma distribution of shape 0.5 and scale
    4 s, and 20 s less that. Of mixed ones each is either, and known beforehand as what it is.
    """
    kind = draw.choice(TOOLS[:2]) if kind == "mixed" else kind
    short_s = min(draw.gammavariate(0.5, 4.0), MOST_S)
    return (short_s, 2.0) if kind == "short" else (MOST_S - short_s, MOST_S - 2.0)


def drawn_sessions(config: IdleAgentsConfig, kind: str, seed: int) -> list[AgentSession]:
    """The sessions of a draw; no two of them read the same text."""
    draw, sessions = random.Random(seed), []
    arrivals_s = Arrivals(config.rate_per_s, seed).times_s(config.sessions)
    for number, arrival_s in enumerate(arrivals_s.tolist()):
        turns = []
        for turn in range(draw.randint(*config.turns)):
            text = (number + 1,) * draw.randint(*(config.returned if turn else config.prompt))
            turns.append(Turn(text, draw.randint(*config.answer), *tool_times_s(kind, draw)))
        sessions.append(AgentSession(arrival_s, tuple(turns)))
    return sessions


MEASURES = {  # of a run -> unit
    "session_s": "s",
    "turn_ttft_mean_ms": "ms",
    "turn_ttft_p99_ms": "ms",
    "tpot_p99_ms": "ms",
    "prefilled_tokens": "tokens",
    "preemptions": "",
}


def league_agents(profile: Profile) -> Outcome:
    """Rows {card, tools, victim, idle, seeds, and for each of ``MEASURES`` a list by seed}."""
    config, rows = profile.section("league_agents", IdleAgentsConfig), []
    seeds = [profile.seed + config.first_seed + number for number in range(config.seeds)]
    for card in config.cards:
        costs = costs_on(card, profile.seed)
        for tools, victim, idle in track(list(product(config.tools, config.victims, config.idle)), desc=card):
            runs = [run_agents(config, costs, tools, victim, idle, seed) for seed in seeds]
            lists = {name: [round(run[name], 4) for run in runs] for name in MEASURES}
            rows.append({"card": card, "tools": tools, "victim": victim, "idle": idle, "seeds": seeds} | lists)
    return Outcome(rows, provenance={"source": "sessions drawn, on operators of cards", "kind": "simulated"})


def run_agents(
    config: IdleAgentsConfig, costs: Costs, tools: str, victim: str, idle: str, seed: int
) -> dict[str, float]:
    """The ``MEASURES`` of one run, under vLLM's recompute."""
    sessions = drawn_sessions(config, tools, seed)
    settings = EngineConfig(
        scheduler="prefill_first",
        prefill_tokens=max(2560, max(session.tokens for session in sessions)),
        token_budget=1 << 20,
        victim=victim_of(victim, costs, seed),
        watermark=0.0,
        share_prefixes=True,
    )
    engine = Engine(SimulatedExecutor(costs, config.blocks), settings, policy=make_policy("recompute"))
    with without_garbage_collection():
        served = serve_sessions(engine, sessions, IDLE_RULES[idle], costs.recompute_s)
    return seen_by_agents(engine, sessions, served)


def seen_by_agents(
    engine: Engine, sessions: Sequence[AgentSession], served: Sequence[Sequence[Request]]
) -> dict[str, float]:
    """The ``MEASURES``: ``session_s`` is the mean time of a session, without that of its tools; a turn's time to its
    first token counts from when its tool returned, of the second turn and later."""
    session_s = [
        requests[-1].times_s[-1] - session.arrival_s - sum(turn.tool_s for turn in session.turns[:-1])
        for session, requests in zip(sessions, served, strict=True)
    ]
    later_s = [request.ttft_s for requests in served for request in requests[1:]]
    tpot_s = [request.tpot_s for requests in served for request in requests if request.tpot_s is not None]
    return {
        "session_s": float(np.mean(session_s)),
        "turn_ttft_mean_ms": float(np.mean(later_s)) * 1e3,
        "turn_ttft_p99_ms": float(np.percentile(later_s, 99)) * 1e3,
        "tpot_p99_ms": float(np.percentile(tpot_s, 99)) * 1e3,
        "prefilled_tokens": float(engine.token_counts[Kind.PREFILL] + engine.token_counts[Kind.RECOMPUTE]),
        "preemptions": float(sum(request.preemptions for requests in served for request in requests)),
    }


def agents_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize each case, and how far its sessions and its tail lie, on the same draws, below those of vLLM's
    defaults."""
    summary = Summary()
    bases = {(row["card"], row["tools"]): row for row in rows if f"{row['victim']} {row['idle']}" == BASE}
    for row in rows:
        labels = {"case": f"{row['card']}, {row['tools']} tools", "variant": row["victim"], "policy": row["idle"]}
        for name, unit in MEASURES.items():
            summary.add(name, bootstrap(row[name]).summary(unit), **labels)
        if (base := bases.get((row["card"], row["tools"]))) is None or base is row:
            continue
        for name in ("session_s", "turn_ttft_mean_ms", "tpot_p99_ms", "prefilled_tokens"):
            below = share_below(row[name], base[name]).summary("%", 100)
            summary.add(name.rpartition("_")[0] + "_below_pct", below, **labels, than=BASE)
    return summary
