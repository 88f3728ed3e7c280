"""Schedulers by name: stall-free batches of chunked prefills (Sarathi-Serve, Agrawal et al., OSDI 2024, Algorithm 3),
what the paper compares them with, their two halves alone, and rivals.

Rivals differ in the token budget, which may hold an objective, or in who begins first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from firsttoken.engine.costs.cost_model import step_parts
from firsttoken.engine.request import Request, ScheduledChunk
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.engine.schedulers.scheduler_config import SchedulerConfig
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown

if TYPE_CHECKING:
    import numpy as np


# What the paper compares with: whole requests, whole prompts beside decodes, and whole prompts first.


class RequestLevel(Scheduler):
    """Request-level scheduling (FasterTransformer): a batch is closed until its last request ends.

    Blocks are reserved for all tokens that a request may have, so nobody is preempted.
    """

    name: ClassVar[str] = "request_level"
    steady: ClassVar[bool] = True

    def schedule(self) -> list[ScheduledChunk]:
        decodes = self.decodes()
        return decodes + self.prefills(reserve=True, admit=not self.running)


class IterationLevel(Scheduler):
    """Iteration-level scheduling (Orca, Yu et al., OSDI 2022): requests join and leave between two steps.

    Whole prompts share a step with decodes. Blocks are reserved at admission, so nobody is preempted.
    """

    name: ClassVar[str] = "iteration_level"
    steady: ClassVar[bool] = True

    def schedule(self) -> list[ScheduledChunk]:
        chunks = self.decodes()
        return chunks + self.prefills(reserve=True)


class PrefillFirst(Scheduler):
    """Prefill-first scheduling (vLLM 0.2, Kwon et al., SOSP 2023): prompts whenever there is room, else decodes.

    Swapped requests come back before anyone new is admitted, and not in a step that had to preempt.
    """

    name: ClassVar[str] = "prefill_first"
    steady: ClassVar[bool] = True

    def schedule(self) -> list[ScheduledChunk]:
        if chunks := self.prefills(admit=not self.swapped):
            return chunks
        return self.ready()[0]


# Sarathi-Serve's two halves alone (Table 4): chunks that never share a batch, and batches that never cut.


class ChunkedOnly(Scheduler):
    """Chunks and decodes take turns, each in batches of their own: a decode waits for one chunk, not for a prompt."""

    name: ClassVar[str] = "chunked_only"
    steady: ClassVar[bool] = True
    _chunked = False  # in the last step

    def schedule(self) -> list[ScheduledChunk]:
        chunks = [] if self._chunked else self._chunk()
        self._chunked = bool(chunks)
        if chunks:
            return chunks
        chunks, calm = self.ready()
        return chunks if chunks or not calm else self._chunk()

    def _chunk(self) -> list[ScheduledChunk]:
        return self.chunks(self.config.token_budget, admit=not self.swapped)


class HybridOnly(Scheduler):
    """Decodes and whole prompts share a batch, however long a prompt is."""

    name: ClassVar[str] = "hybrid_only"
    steady: ClassVar[bool] = True

    def schedule(self) -> list[ScheduledChunk]:
        chunks, calm = self.ready()
        return chunks + self.prefills(admit=calm and not self.swapped)


# Both together, and rivals.


class Sarathi(Scheduler):
    """Every ready decode is in every batch; what the token budget leaves goes to chunks of prompts.

    Prompts that have begun go before new ones, first come, first served. In a step that had to preempt, and while
    anyone is swapped out, nobody new begins.
    """

    name: ClassVar[str] = "sarathi"
    steady: ClassVar[bool] = True

    @classmethod
    def check(cls, config: SchedulerConfig) -> None:
        if config.token_budget < config.requests:
            raise ProfileError(
                f"engine: a token budget of {config.token_budget} cannot hold a token of each of {config.requests} "
                "requests; raise token_budget or lower requests"
            )

    def schedule(self) -> list[ScheduledChunk]:
        chunks, calm = self.ready()
        return chunks + self.chunks(self.budget(chunks) - len(chunks), admit=calm and not self.swapped)

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
        """Tokens that the coming step may hold, those of its ``decodes`` included."""
        return self.config.token_budget


class PrefillCap(Sarathi):
    """``prefill_tokens`` a step, or ``token_budget`` while at least two prompts are unfinished and somebody decodes.

    The two budgets are chosen by hand, as in P-PAS (Sämann, arXiv 2608.15171).
    """

    name: ClassVar[str] = "prefill_cap"

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
        unfinished = len(self.waiting) + sum(not request.decoding for request in self.running)
        pressed = unfinished >= 2 and bool(decodes)
        return self.config.token_budget if pressed else max(self.config.prefill_tokens, self.config.token_budget)


class ShortestFirst(Sarathi):
    """Sarathi's batches; of the waiting prompts the one with the fewest tokens left begins first.

    Whoever has waited ``wait_s`` goes before all who have not, first come, first served: from then on nobody who came
    later begins before it. So does whoever has begun and had to give way: its client waits in the middle of an answer,
    and what it has to compute again grows with every token that it had.
    """

    name: ClassVar[str] = "shortest_first"

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
        now = self.preemptor.executor.now()

        def turn(request: Request) -> tuple[bool, float, tuple[float, int]]:
            young = request.begun_s is None and now - request.arrival_s < self.config.wait_s
            return young, request.remaining if young else 0, request.order

        self.sort_waiting(turn)
        return self.config.token_budget


# How long a step will take, learnt from the steps that were: what an adaptive scheduler chooses its chunk by.

SEEN = 128  # steps of a kind that are remembered: a few seconds of a busy GPU, so that a change is soon learnt
REFIT = 16  # steps between two fits, which take 0.3 ms
LEAST = 4  # steps of a kind before the first
# a chunk is at most so many times the largest that is remembered: a line is not trusted far beyond its points
GROWTH = 2


class StepTimeModel:
    """Prices of a step's parts by least squares over the last steps, and how far these were off.

    Steps that only decode are remembered apart, lest they crowd out the others.
    """

    def __init__(self) -> None:
        self._steps = {mixed: deque[tuple[list[float], float]](maxlen=SEEN) for mixed in (False, True)}
        self._prices: np.ndarray | None = None
        self._margin = 1.0
        self._largest = 0.0
        self._since = 0

    def observe(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int], seconds: float) -> None:
        """Learn that a step of these parts took ``seconds``."""
        if seconds > 0:
            parts = step_parts(prefills, contexts)
            self._steps[bool(prefills)].append((parts, seconds))
            self._largest = max(self._largest, parts[1])
            self._since += 1
            if prefills and self._prices is not None:  # at once: until the next fit there may be 16 such steps
                self._margin = max(self._margin, seconds / max(float(self._prices.dot(parts)), 1e-9))
        if self._since >= (REFIT if self._prices is not None else 1) and len(self._steps[True]) >= LEAST:
            self._fit()

    def most_tokens(self, contexts: Sequence[int], cached: int, seconds: float, most: int) -> int | None:
        """Tokens of a prompt with ``cached`` tokens behind it, up to ``most``, with which a step that also decodes over
        ``contexts`` stays within ``seconds``; None before enough was seen."""
        if self._prices is None:
            return None
        low, high = 0, min(most, int(GROWTH * self._largest))
        parts = step_parts([], contexts)
        while low < high:
            middle = (low + high + 1) // 2
            # the decodes, of which there are many, stay as they are
            parts[1:3] = step_parts([(cached, middle)], [])[1:3]
            took = float(self._prices.dot(parts)) * self._margin
            low, high = (middle, high) if took <= seconds else (low, middle - 1)
        return low

    def _fit(self) -> None:
        import numpy as np  # here: only this scheduler fits its steps

        from firsttoken.engine.costs.fitted import relative_fit

        parts, took = (np.array(column) for column in zip(*self._steps[False], *self._steps[True], strict=True))
        self._prices = relative_fit(parts, took)
        mixed = slice(len(self._steps[False]), None)
        off = took[mixed] / np.maximum(parts[mixed] @ self._prices, 1e-9)
        # the longest that is remembered, and as much as they scatter: the contexts of the next ones are longer
        self._margin = max(1.0, float(off.max() + off.std()))
        self._largest = float(parts[mixed, 1].max())
        self._since = 0


class AdaptiveBudget(Sarathi):
    """The step may take ``tbt_s``, by what the last steps took; ``prefill_tokens`` bound it where nobody decodes.

    No budget is chosen by hand. ``token_budget`` holds until enough steps were seen. A prompt always goes on by a
    block, so that decodes alone cannot starve it.
    """

    name: ClassVar[str] = "adaptive_budget"

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.step_times = StepTimeModel()

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
        return len(decodes) + self.room(decodes, self.config.tbt_s)

    def room(self, decodes: Sequence[ScheduledChunk], seconds: float) -> int:
        """Prompt tokens beside ``decodes`` in a step of ``seconds``."""
        most = max(self.config.prefill_tokens, self.config.token_budget)
        if not decodes:
            return most
        begun = next((request.cached for request in self.running if not request.decoding), 0)
        fitting = self.step_times.most_tokens([chunk.start for chunk in decodes], begun, seconds, most)
        return self.config.token_budget - len(decodes) if fitting is None else max(fitting, self.block_tokens)

    def completed(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int], seconds: float) -> None:
        self.step_times.observe(prefills, contexts, seconds)


class Deadline(AdaptiveBudget):
    """Chunks are sized by the slack of the tightest decode, prompts by deadline (Niyama, arXiv 2503.22562).

    The first token of a request is due ``ttft_s`` after its arrival, each further one ``tbt_s`` later.

    A request whose tokens came early has slack, and the step may take as long as the least slack of all decodes. One
    that is behind is due ``tbt_s`` after its last token: what is lost is not caught up at the price of the prompts
    that wait, which would be late then, too, and the next ones after them. The prompt whose first token is due first
    begins first.
    """

    name: ClassVar[str] = "deadline"

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
        now = self.preemptor.executor.now()
        self.sort_waiting(lambda request: (self._due(request), request.number))
        slack = min((self._decode_due(chunk.request) - now for chunk in decodes), default=self.config.tbt_s)
        return len(decodes) + self.room(decodes, max(slack, 0.0))

    def _due(self, request: Request) -> float:
        """Return the time at which the next token of ``request`` was promised."""
        return request.arrival_s + self.config.ttft_s + self.config.tbt_s * len(request.times_s)

    def _decode_due(self, request: Request) -> float:
        """Return the time at which the next token of ``request``, which has one or a draft, is due."""
        last_s = request.times_s[-1] if request.times_s else request.arrival_s
        return max(self._due(request), last_s + self.config.tbt_s)


_OF_THE_PAPER = (RequestLevel, IterationLevel, PrefillFirst, Sarathi, ChunkedOnly, HybridOnly)
_RIVALS = (PrefillCap, Deadline, AdaptiveBudget, ShortestFirst)
SCHEDULERS: dict[str, type[Scheduler]] = {kind.name: kind for kind in (*_OF_THE_PAPER, *_RIVALS)}
REPORTED: dict[str, type[Scheduler]] = {  # as the report's registry calls them (Sarathi-Serve, schedulers)
    "faster_transformer": RequestLevel,
    "orca": IterationLevel,
    "vllm": PrefillFirst,
    "simple_chunking": ChunkedOnly,
}


def scheduler_named(name: str | type[Scheduler]) -> type[Scheduler]:
    """The scheduler of this name, its own or the report's; a class of one's own is taken as it is.

    Raises ProfileError when there is none of the name.
    """
    if isinstance(name, type):
        return name
    if scheduler := SCHEDULERS.get(name) or REPORTED.get(name):
        return scheduler
    raise ProfileError(f"engine: no scheduler {name!r}; {unknown(name, [*SCHEDULERS, *REPORTED])}")
