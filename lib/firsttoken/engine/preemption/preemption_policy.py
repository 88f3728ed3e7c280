"""Preemption: a victim loses its blocks and comes back. A policy chooses and is told what recoveries cost, a preemptor
acts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from firsttoken.engine.executor import Executor
from firsttoken.engine.request import Request, ScheduledChunk
from firsttoken.study.errors import RequestError

MOVED = "moved to another view"


class Action(StrEnum):
    """The way in which a preempted request comes back: its keys and values wait on the host, or are computed again, or
    those of its first tokens are computed again while the others come from the host."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    BOTH_ENDS = "both ends"


@dataclass(frozen=True)
class Observation:
    """A cost that the engine has seen.

    SWAP is one recovery: out, prep and in. RECOMPUTE is a prefill of ``tokens`` tokens from nothing, a first one as
    well as a repeated one: both cost the same, so ordinary prefills teach the price of recomputing for nothing. Of a
    recovery from both ends nobody learns. Raises RequestError for less than one token, or seconds that are negative or
    not finite.
    """

    action: Action
    tokens: int
    seconds: float
    now_s: float

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.seconds < math.inf:
            raise RequestError(f"observation: {self.tokens} tokens in {self.seconds} s; give 1 or more and 0 s or more")


class PreemptionPolicy(ABC):
    """A policy that chooses for one victim at a time."""

    name: ClassVar[str]

    @abstractmethod
    def choose(self, tokens: int, now_s: float) -> Action:
        """Choose how a victim that holds the keys and values of ``tokens`` tokens shall come back."""

    def head(self, tokens: int, now_s: float) -> int:
        """Return how many of the first of ``tokens`` tokens are computed again, of a victim that comes back from both
        ends."""
        return tokens // 2

    def observe(self, observation: Observation) -> None:  # noqa: B027 - a static policy learns nothing
        """Learn from a cost; the default learns nothing."""


@dataclass(frozen=True)
class Recovery:
    """One preemption and what undoing it took, in seconds; the parts as CPS Table 2 has them.

    ``reason`` says who decided: "policy", or the engine for a "partial prefill", a "host pool full", or ``MOVED``.
    ``tokens`` were swapped, or processed again in however many steps until all that was lost was there (the
    last step's may be more), or both; ``recompute_s`` is the share of these steps, by tokens. Who is preempted again
    on the way has two recoveries.
    """

    request: int
    action: Action
    reason: str
    tokens: int
    preempted_at_s: float
    out_s: float = 0.0
    prep_s: float = 0.0
    in_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """Return the seconds that the recovery cost, without the waiting for blocks."""
        return self.out_s + self.prep_s + self.in_s + self.recompute_s


class Preemptor:
    """Evicts and restores; ``recovered`` is told of each recovery that is complete."""

    def __init__(
        self, policy: PreemptionPolicy, executor: Executor, recovered: Callable[[Recovery], None] | None = None
    ) -> None:
        self.policy = policy
        self.executor = executor
        self._recovered = recovered
        self._open: dict[int, Recovery] = {}
        self._prefills: dict[int, tuple[int, float]] = {}  # tokens and seconds so far of prompts in pieces

    @property
    def recovering(self) -> bool:
        """Return whether a preempted request has not got back all that it lost."""
        return bool(self._open)

    def evict(self, victim: Request) -> Action:
        """Save or forget what ``victim`` has cached, and return which; then its blocks may be given away."""
        now = self.executor.now()
        action, reason = self._decide(victim, now)
        moved = None if action is Action.RECOMPUTE else self.executor.swap_out(victim)
        if action is not Action.RECOMPUTE and moved is None:
            action, reason = Action.RECOMPUTE, "host pool full"
        self._interrupt(victim)
        recovery = Recovery(victim.number, action, reason, 0, now)
        if moved is not None:
            recovery = replace(recovery, tokens=victim.cached, out_s=moved.copy_s, prep_s=moved.prep_s)
        else:
            self._drop_copy(victim)
            victim.forget()
        victim.preemptions += 1
        self._open[victim.number] = recovery
        return action

    def move(self, request: Request) -> None:
        """Note that another version computes again what ``request`` has cached, and give up its copy on the host."""
        self._drop_copy(request)
        self._interrupt(request)
        self._open[request.number] = Recovery(request.number, Action.RECOMPUTE, MOVED, 0, self.executor.now())

    def restore(self, request: Request) -> None:
        """Begin to bring a swapped request back into the blocks it has been given; what it computes again of it, it
        computes meanwhile."""
        request.transfer = self.executor.swap_in(request)
        if request.head:
            request.cached = 0

    def poll(self, request: Request, *, wait: bool = False) -> bool:
        """Return whether a restoring request is ready to run; with ``wait``, once it is."""
        if not (wait or request.transfer.done):
            return False
        moved, request.transfer = request.transfer.wait(), None
        if not self.executor.write_through:  # else it stays what the blocks hold, and grows on
            self._drop_copy(request)
        if request.head:
            request.cached, request.head = request.computed, 0
        recovery = self._open.pop(request.number)
        self._close(replace(recovery, prep_s=recovery.prep_s + moved.prep_s, in_s=moved.copy_s), request.cached)
        return True

    def processed(self, chunk: ScheduledChunk, seconds: float) -> None:
        """Note that ``chunk`` took ``seconds`` of its step: prompts from their first token on teach what recomputing
        costs."""
        number, recovery = chunk.request.number, self._open.pop(chunk.request.number, None)
        if recovery is not None:
            tokens, seconds = recovery.tokens + chunk.tokens, recovery.recompute_s + seconds
            recovery = replace(recovery, tokens=tokens, recompute_s=seconds)
            if chunk.end < chunk.computed or recovery.action is Action.BOTH_ENDS:  # which ends with its copy
                self._open[number] = recovery
            else:
                self._close(recovery, chunk.end)
            return
        if chunk.decodes or chunk.redo is not None:
            return
        tokens, before_s = self._prefills.pop(number, (0, 0.0))
        tokens, seconds = tokens + chunk.tokens, before_s + seconds
        if chunk.end < chunk.request.prompt_tokens:
            self._prefills[number] = tokens, seconds
        else:
            self._learn(Action.RECOMPUTE, tokens, seconds, chunk.end)

    def forget(self, request: Request) -> None:
        """Drop what is noted of the request, which ended, wherever it stood."""
        self._open.pop(request.number, None)
        self._prefills.pop(request.number, None)
        self.executor.forget(request)
        self._drop_copy(request)

    def _drop_copy(self, request: Request) -> None:
        """Give up the copy on the host, from which nothing comes back any more."""
        transfer, host = request.transfer, request.host
        request.transfer, request.host, request.saved = None, None, 0
        # A copy that is under way still reads the host's rows and writes to the blocks: both must stay until it ends.
        if transfer is not None:
            with suppress(Exception):  # one that failed is over too
                transfer.wait()
        if host is not None:
            self.executor.drop(host)

    def _interrupt(self, request: Request) -> None:
        """Close what was under way for ``request``, which will have to begin again with it."""
        self._prefills.pop(request.number, None)
        if (interrupted := self._open.pop(request.number, None)) is not None:
            self._close(interrupted, request.cached)

    def _decide(self, victim: Request, now_s: float) -> tuple[Action, str]:
        if not victim.decoding:
            return Action.RECOMPUTE, "partial prefill"
        action, size = self.policy.choose(victim.cached, now_s), self.executor.block_tokens
        if action is Action.BOTH_ENDS:
            victim.head = self.policy.head(victim.cached, now_s) // size * size
            if not 0 < victim.head < victim.cached or victim.keys or victim.sampling.verify is not None:
                action, victim.head = Action.SWAP, 0  # shared blocks and drafts come back as they were
        return action, "policy"

    def _close(self, recovery: Recovery, cached: int) -> None:
        if recovery.reason != MOVED and recovery.action is not Action.BOTH_ENDS:  # parts of a prefill or of a copy
            self._learn(recovery.action, recovery.tokens, recovery.cost_s, cached)
        if self._recovered is not None:
            self._recovered(recovery)

    def _learn(self, action: Action, tokens: int, seconds: float, cached: int) -> None:
        """Tell the policy the cost, unless others than these ``tokens`` made up what is ``cached`` now, or none did."""
        if tokens == cached > 0:
            self.policy.observe(Observation(action, tokens, seconds, self.executor.now()))
