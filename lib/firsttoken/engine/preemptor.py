"""How a victim loses its blocks and comes back: the mechanism. What to do with whom is a policy (``preemption``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from firsttoken.engine.executor import Executor
from firsttoken.engine.preemption.base import Action, Observation, PreemptionPolicy
from firsttoken.engine.request import Phase, Request


@dataclass(frozen=True)
class Recovery:
    """One preemption and what undoing it took, in seconds; the parts as CPS Table 2 has them.

    ``reason`` says who decided: "policy", or the engine for a "partial prefill" or a "host pool full".
    ``recompute_s`` is the re-prefill's share of its step, by tokens.
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
        """What the recovery cost, without the waiting for blocks."""
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

    def evict(self, victim: Request) -> None:
        """Save or forget what ``victim`` has cached; afterwards its blocks may be given away. Sets its phase."""
        now = self.executor.now()
        action, reason = self._decide(victim, now)
        moved = self.executor.swap_out(victim) if action is Action.SWAP else None
        if action is Action.SWAP and moved is None:
            action, reason = Action.RECOMPUTE, "host pool full"
        recovery = Recovery(victim.number, action, reason, victim.cached, now)
        if moved is not None:
            recovery = replace(recovery, out_s=moved.copy_s, prep_s=moved.prep_s)
            victim.phase = Phase.SWAPPED
        else:
            victim.phase, victim.cached, victim.recomputing = Phase.WAITING, 0, True
        victim.preemptions += 1
        self._open[victim.number] = recovery

    def restore(self, request: Request) -> None:
        """Begin to bring a swapped request back into the blocks it has been given. Sets its phase."""
        request.transfer = self.executor.swap_in(request)
        request.phase = Phase.RESTORING
        self.poll(request)

    def poll(self, request: Request, *, wait: bool = False) -> bool:
        """Whether a restoring request is ready to run; with ``wait``, once it is."""
        if not (wait or request.transfer.done):
            return False
        moved = request.transfer.wait()
        self.executor.drop(request.host)
        request.transfer, request.host, request.phase = None, None, Phase.RUNNING
        recovery = self._open.pop(request.number)
        self._close(replace(recovery, prep_s=recovery.prep_s + moved.prep_s, in_s=moved.copy_s))
        return True

    def prefilled(self, request: Request, tokens: int, seconds: float) -> None:
        """A whole prompt of ``tokens`` was prefilled in ``seconds``: an ordinary one teaches what recomputing costs."""
        recovery = self._open.pop(request.number, None) if request.recomputing else None
        request.recomputing = False
        if recovery is not None:
            self._close(replace(recovery, tokens=tokens, recompute_s=seconds))
        else:
            self.policy.observe(Observation(Action.RECOMPUTE, tokens, seconds, self.executor.now()))

    def forget(self, request: Request) -> None:
        """The request ended while it was away, or on its way back."""
        if request.transfer is not None:
            with suppress(Exception):  # one that failed is over too
                request.transfer.wait()
        if request.host is not None:
            self.executor.drop(request.host)
        request.transfer = request.host = None
        self._open.pop(request.number, None)

    def _decide(self, victim: Request, now_s: float) -> tuple[Action, str]:
        if not victim.decoding:
            return Action.RECOMPUTE, "partial prefill"
        return self.policy.choose(victim.cached, now_s), "policy"

    def _close(self, recovery: Recovery) -> None:
        self.policy.observe(Observation(recovery.action, recovery.tokens, recovery.cost_s, self.executor.now()))
        if self._recovered is not None:
            self._recovered(recovery)
