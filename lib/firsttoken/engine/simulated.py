"""The executor that charges a cost model: the engine itself becomes the simulator. Its tokens mean nothing."""

from __future__ import annotations

import gc
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.executor import Limits, SwapIn
from firsttoken.engine.request import Request, ScheduledChunk, shapes

NO_LIMIT = 1 << 62
TOKEN = 0  # what every request says


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside the block nothing is searched for garbage: a simulation makes a tuple for each token and no circles, and
    the search through what it keeps took half of its time."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@dataclass(frozen=True)
class ChargedCopy:
    """Seconds that one way of a swap was charged, which are over by then."""

    copy_s: float
    prep_s: float = 0.0
    done: ClassVar[bool] = True

    def wait(self) -> ChargedCopy:
        return self


@dataclass(frozen=True)
class CopyBesideSteps:
    """A way back that ends at ``ends_s`` of the clock of ``executor``, while steps go on."""

    executor: SimulatedExecutor
    ends_s: float
    charged: ChargedCopy

    @property
    def done(self) -> bool:
        return self.executor.now() >= self.ends_s

    def wait(self) -> ChargedCopy:
        self.executor.wait_until(self.ends_s)
        return self.charged


class SimulatedExecutor:
    """Time passes by ``costs``, one model or a function from the time in s to the model that holds then.

    With ``write_through`` a swap copies what its last block holds, as the full ones were copied before: beside the
    steps, which is not charged. A token has 12 kB in CPS's set-up, half a microsecond of its link.
    """

    def __init__(
        self,
        costs: Costs | Callable[[float], Costs],
        blocks: int,
        *,
        block_tokens: int = 16,
        host_blocks: int = 0,
        context: int = NO_LIMIT,
        write_through: bool = False,
    ) -> None:
        self.costs_at = (lambda now_s: costs) if isinstance(costs, Costs) else costs
        self._steady = isinstance(costs, Costs)  # one model holds at all times
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.limits = Limits(context, NO_LIMIT)
        self.salt = ""
        self.version = None
        self.write_through = write_through
        self._host_free = host_blocks
        self._now = 0.0

    def now(self) -> float:
        """Return the simulated time in seconds."""
        return self._now

    def wait_until(self, moment_s: float) -> None:
        """Set the simulated clock to ``moment_s``, unless it is later already."""
        self._now = max(self._now, moment_s)

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        """Charge the time of the step; every next token is ``TOKEN``."""
        self.charge(*shapes(chunks))
        return [TOKEN] * len(chunks)

    def charge(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Let the time of a step of these shapes pass, and return the clock then."""
        self._now += self.costs_at(self._now).step_s(prefills, contexts)
        return self._now

    def charge_decodes(self, contexts: Sequence[int], steps: int, until_s: float) -> list[float]:
        """Let the time of up to ``steps`` steps pass in which requests with ``contexts`` cached tokens decode, of which
        none begins at ``until_s`` or later. Return the clock after each."""
        if self._now >= until_s or not steps:
            return []
        costs = self.costs_at(self._now)
        if not self._steady:
            steps = 1
        elif until_s < math.inf:  # no more than begin before it, as steps hardly ever become shorter
            steps = min(steps, int((until_s - self._now) / max(costs.step_s((), contexts), 1e-9)) + 1)
        times = list(accumulate(costs.decode_steps_s(contexts, steps), initial=self._now))[1:]
        times = times[: bisect_left(times, until_s) + 1]
        self._now = times[-1] if times else self._now
        return times

    def swap_out(self, request: Request) -> ChargedCopy | None:
        """Charge the time of the way out, if the host pool has room."""
        tokens = request.cached - request.head
        blocks = -(-(request.cached if self.write_through else tokens) // self.block_tokens)
        lacking = blocks - (request.host or 0)  # a copy of an earlier swap may be kept
        if lacking > self._host_free:
            return None
        self._host_free -= lacking
        request.host = blocks
        if self.write_through:
            tokens %= self.block_tokens
        charged = ChargedCopy(self.costs_at(self._now).swap_out_s(tokens) if tokens else 0.0)
        self._now += charged.copy_s
        return charged

    def swap_in(self, request: Request) -> SwapIn:
        """Charge the time of the way back; beside the steps where the request computes its first tokens meanwhile."""
        charged = ChargedCopy(self.costs_at(self._now).swap_in_s(request.cached - request.head))
        if request.head:
            return CopyBesideSteps(self, self._now + charged.copy_s, charged)
        self._now += charged.copy_s
        return charged

    def drop(self, host: int) -> None:
        """Give blocks back to the host pool."""
        self._host_free += host

    def fill(self, request: Request, layer: int, kv: object) -> None:
        """Do nothing, as nothing is computed with keys and values."""

    def hidden_states_of(self, hidden: object, tokens: int) -> object:
        """Return ``hidden`` as it is, as nothing is computed with it."""
        return hidden

    def forget(self, request: Request) -> None:
        """Do nothing, as nothing is kept of a request."""

    def close(self) -> None:
        """Do nothing, as there is nothing to give back."""
