"""A request: what a client asked for, and how far it has come."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import index
from typing import TYPE_CHECKING, Any

from firsttoken.engine.work import Redo, Work
from firsttoken.study.errors import RequestError

if TYPE_CHECKING:
    import torch

    from firsttoken.engine.brought import PrefixSource
    from firsttoken.engine.chances import Chance
    from firsttoken.engine.views import View


class Phase(StrEnum):
    """Where a request stands. A restoring one has its blocks again, but its keys and values are still on the way."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    RESTORING = "restoring"
    FINISHED = "finished"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to end.

    ``temperature`` 0 is greedy; ``top_p`` keeps the likeliest tokens that make up this share; ``stop`` are token ids
    that end the request, and are part of its output. ``seed`` makes a request's draws its own: they do not depend on
    what else is in the batch. With ``logprobs`` each token's :class:`Chance` is kept, and so many of the likeliest with
    it; with ``prompt_logprobs`` those of the prompt's tokens too, but the first's, which nothing comes before.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.temperature <= sys.float_info.max:
            raise RequestError(f"temperature must be 0 (greedy) or a positive number, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed must have at most 64 bits, not {self.seed}")
        if self.logprobs is not None and self.logprobs < 0:
            raise RequestError(f"logprobs must be 0 or more, not {self.logprobs}")


GREEDY = Sampling()


class Request:
    """One request of the engine; ``arrival_s`` and ``times_s`` (of each output token) are on the engine's clock.

    It computes with the ``view`` that it began with, unless it ``moves`` to what is published while it is open.
    """

    def __init__(
        self, number: int, prompt: Sequence[int], sampling: Sampling, arrival_s: float, *, moves: bool = False
    ) -> None:
        try:
            self.tokens = list(map(index, prompt))  # the output is appended
        except TypeError as error:
            raise RequestError(f"the prompt holds something that is no token id: {error}") from None
        if not self.tokens:
            raise RequestError("the prompt is empty; give at least one token")
        self.number = number
        self.sampling = sampling
        self.arrival_s = arrival_s
        self.order = arrival_s, number  # first come, first served
        self.prompt_tokens = len(self.tokens)
        self.begun_s: float | None = None  # when it was in a step for the first time
        self.times_s: list[float] = []
        self.phase = Phase.WAITING  # the scheduler's to change
        self.cached = 0  # tokens whose keys and values are in the pool, or in the host's
        self.computed = 0  # tokens whose keys and values were ever there
        self.moves = moves
        self.view: View | None = None  # since its first step
        self.redo: Redo | None = None  # before it goes on
        self.source: PrefixSource | None = None  # of its first tokens, until all that is wanted has come
        self.fell_back = ""  # or why its source's tokens were computed after all
        self.blocks: list[int] = []
        self.keys: list[bytes] = []  # a salt, and the keys of the full blocks, where prefixes are shared
        self.published = 0  # of its blocks
        self.host: Any = None  # the executor's handle of the copy in host memory
        self.transfer: Any = None  # on its way back
        self.chances: list[Chance] = []  # of the output, where they were asked for
        self.prompt_chances: list[Chance] = []  # of the prompt from its second token on
        self.preemptions = 0
        self.losses = 0  # of the device it ran on, since its last token
        self.failure: Exception | None = None  # why it ended early, where it was not the client's wish
        self._generator: torch.Generator | None = None

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def most_cached(self) -> int:
        """Tokens whose keys and values are in the pool at most; those of the last token are never needed."""
        return self.prompt_tokens + self.sampling.max_tokens - 1

    @property
    def todo(self) -> int:
        """Tokens to process before the next one can be chosen, or before what is to be redone is; 1 while decoding."""
        return (self.redo.end if self.redo else len(self.tokens)) - self.cached

    @property
    def decoding(self) -> bool:
        """Whether the prompt is cached, and all that was ever computed behind it."""
        return self.prompt_tokens <= self.cached == self.computed

    @property
    def recomputing(self) -> bool:
        """The marker of CPS 3.2.2: what was cached once has to be computed again."""
        return self.cached < self.computed

    def work(self, tokens: int | None = None) -> Work:
        """Its next ``tokens`` tokens (all that are to do) as the work of a step."""
        end = self.cached + (self.todo if tokens is None else tokens)
        return Work(self, self.cached, end, self.computed, self.redo)

    def advance(self, end: int) -> None:
        """A step has left the keys and values of its first ``end`` tokens in the pool."""
        self.cached = end
        self.computed = max(self.computed, end)
        if self.redo is not None and end >= self.redo.end:
            self.redo = None

    def turn(self, view: View, redo: Redo | None = None) -> None:
        """It computes with ``view`` from now on, after what there is to ``redo``."""
        if redo is not None and redo is not self.redo:
            self.cached = 0
        self.view, self.redo = view, redo

    def forget(self) -> None:
        """Its keys and values are gone; what was computed will be computed again."""
        self.cached, self.redo = 0, None
        self.give_up_source()

    def give_up_source(self) -> None:
        """Nothing more is wanted from elsewhere."""
        if self.source is not None:
            self.source.close()
            self.source = None

    @property
    def finished(self) -> bool:
        """Whether it is over."""
        return self.phase is Phase.FINISHED

    @property
    def generator(self) -> torch.Generator:
        """The source of this request's draws, made on first use."""
        if self._generator is None:
            import torch

            self._generator = torch.Generator().manual_seed(self.sampling.seed)
        return self._generator

    def append(self, token: int, now_s: float) -> bool:
        """Take the next token; whether it is the last."""
        self.tokens.append(token)
        self.times_s.append(now_s)
        self.losses = 0
        return len(self.times_s) >= self.sampling.max_tokens or token in self.sampling.stop

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.times_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        gaps = len(self.times_s) - 1
        return (self.times_s[-1] - self.times_s[0]) / gaps if gaps else None
