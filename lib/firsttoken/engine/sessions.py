"""Sessions of several turns, as of an agent that calls tools; and idle rules: how long the KV blocks of a session stay
its own while it waits for a tool.

The rules are after InferCept (Abhyankar et al., ICML 2024), which calls them discard, preserve and min-waste, and
Continuum, which gives blocks a time to live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firsttoken.engine.engine import Engine
from firsttoken.engine.request import Request, Sampling
from firsttoken.study.errors import ProfileError, RequestError

TIME_TO_LIVE_S = 2.0  # a fixed one; Continuum sets it by the times that the tool took before
LONG_TOOL_S = 10.0  # half of the longest time of InferCept's benchmark; no other was tried


@dataclass(frozen=True)
class Turn:
    """One turn: the new part of its prompt, the tokens of its answer, the seconds that the tool behind it takes, after
    which the next turn comes, and those that it is expected to take."""

    prompt: tuple[int, ...]
    answer_tokens: int
    tool_s: float = 0.0
    expected_s: float = 0.0


@dataclass(frozen=True)
class AgentSession:
    """The turns of a session, each of which reads all that was said before it; the first comes at ``arrival_s``."""

    arrival_s: float
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """All tokens that it reads and says."""
        return sum(len(turn.prompt) + turn.answer_tokens for turn in self.turns)


@dataclass(frozen=True)
class IdleBlocks:
    """A session that waits for a tool: the share that its blocks are of all that are taken, the seconds that the tool
    is expected to take, and those that computing its tokens again would."""

    share: float
    tool_s: float
    recompute_s: float


@dataclass(frozen=True)
class Keep:
    """The answer of an idle rule. Blocks that are not ``found`` again are forgotten at once. The others stay the
    session's for ``hold_s``, and then until somebody needs the room; those that are ``first_out`` go first, of several
    the one that was used last."""

    hold_s: float = 0.0
    found: bool = True
    first_out: bool = False


IdleRule = Callable[[IdleBlocks], Keep]


def discard(idle: IdleBlocks) -> Keep:
    """Forget them at once, nearly as an engine without a prefix cache: a preempted turn still finds what it had."""
    return Keep(found=False)


def cache(idle: IdleBlocks) -> Keep:
    """Keep them until somebody needs the room; who was used last loses them last: vLLM's prefix cache."""
    return Keep()


def cache_short(idle: IdleBlocks) -> Keep:
    """Keep them as ``cache`` does, but take those of sessions that wait for a long tool first (this project)."""
    return Keep(first_out=idle.tool_s > LONG_TOOL_S)


def preserve(idle: IdleBlocks) -> Keep:
    """Hold them until the tool returns."""
    return Keep(math.inf)


def time_to_live(idle: IdleBlocks) -> Keep:
    """Hold them for a fixed time."""
    return Keep(TIME_TO_LIVE_S)


def min_waste(idle: IdleBlocks) -> Keep:
    """Hold them where that wastes less than computing them again would, in blocks times seconds: their own until the
    tool returns, or all that are taken during a prefill. InferCept counts those of running requests, and prefills in
    chunks."""
    return Keep(math.inf) if idle.tool_s * idle.share < idle.recompute_s else Keep()


IDLE_RULES: dict[str, IdleRule] = {
    rule.__name__: rule for rule in (discard, cache, cache_short, preserve, time_to_live, min_waste)
}


def serve_sessions(
    engine: Engine, sessions: Sequence[AgentSession], rule: IdleRule, recompute_s: Callable[[int], float]
) -> list[list[Request]]:
    """Run ``sessions`` to the end on an engine that shares prefixes; return the requests of each.

    ``recompute_s`` says how long a prefill of so many tokens takes. Blocks are held only where the longest session
    still fits beside all that are held, so that there is always one that can run. Raises RequestError for a session
    without a turn or too long for the pool, and ProfileError for an engine without ``share_prefixes``.
    """
    if (prefixes := engine.prefixes) is None:
        raise ProfileError("sessions: idle blocks are found by prefix sharing; set share_prefixes of the engine")
    pool, size, turns = engine.pool, engine.executor.block_tokens, [[] for _ in sessions]
    most_held = pool.count - pool.watermark - max([-(-session.tokens // size) for session in sessions], default=0)
    if most_held < 0 or not all(session.turns for session in sessions):
        raise RequestError(f"sessions: each needs a turn, and room for all of its tokens in {pool.count} blocks")
    held: dict[int, tuple[float, list[int]]] = {}  # by session: until when, and which blocks

    def submit(number: int, arrival_s: float) -> None:
        before, turn = turns[number], sessions[number].turns[len(turns[number])]
        prompt = [*(before[-1].tokens if before else ()), *turn.prompt]
        before.append(engine.submit(prompt, Sampling(turn.answer_tokens), arrival_s))

    def pause(number: int) -> None:
        """Take the blocks of the turn that has ended, before anybody else does, and give up what is not held."""
        ended, turn, now = turns[number][-1], sessions[number].turns[len(turns[number]) - 1], engine.executor.now()
        blocks = pool.allocate(0, shared=prefixes.find(ended))
        pool.release(held.pop(number, (0.0, []))[1])  # of the turn before, which may have ended in the step it began in
        share = len(blocks) / max(1, pool.count - pool.free)
        keep = rule(IdleBlocks(share, turn.expected_s, recompute_s(len(ended.tokens))))
        if not keep.found:
            pool.withdraw(blocks)
        if keep.hold_s > 0 and sum(len(others) for _, others in held.values()) + len(blocks) <= most_held:
            held[number] = now + min(keep.hold_s, turn.tool_s), blocks
        else:
            pool.release(blocks, first_out=keep.first_out)
        submit(number, now + turn.tool_s)

    for number, session in enumerate(sessions):
        submit(number, engine.executor.now() + session.arrival_s)
    while engine.busy:
        for number in [number for number, (until_s, _) in held.items() if until_s <= engine.executor.now()]:
            pool.release(held.pop(number)[1])
        for work in (engine.step, engine.leap):
            work()
            for number, session in enumerate(sessions):
                if turns[number][-1].finished and len(turns[number]) < len(session.turns):
                    pause(number)
    for _, blocks in held.values():
        pool.release(blocks)
    return turns
