"""A request: what a client asked for, and how far it has come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from firsttoken.study.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


# How likely a model thought a token, as OpenAI's interface reports it.

MIN_LOGPROB = -9999.0  # stands for the logarithm of 0, which no JSON can carry


class TokenLogprob(NamedTuple):
    """The natural logarithm of the probability that the model gave a token, before temperature and nucleus.

    ``top_logprobs`` are (token id, logarithm) of those that the model gave the largest shares, the largest first. No
    logarithm is below ``MIN_LOGPROB``.
    """

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


# What a step does for a request: which of its tokens it processes, and as what they are booked.


class Kind(StrEnum):
    """The kind of work that a step does for a token: for the first time, on one of the prompt (prefill) or on one that
    was generated (decode); or once more (recompute)."""

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"


class TokenSpan(NamedTuple):
    """Tokens [start, end) of a request, and what a step does for them."""

    request: int
    kind: Kind
    start: int
    end: int


class LayerRecompute(NamedTuple):
    """Work of a request in some layers, most often once more: its first ``end`` tokens through ``layers`` (0-based).

    ``hidden`` [1, end, hidden] enters the first of them; None where that is what the model makes of the ids. Of a
    prompt that follows layers which arrive, ``leave`` is given what leaves the last of ``layers``, the number of the
    first token and states [tokens, hidden]; the last ones of the model then say the next token (``says``).
    """

    layers: range
    end: int
    hidden: Tensor | None = None
    leave: Callable[[int, Tensor], None] | None = None
    says: bool = False


class ScheduledChunk(NamedTuple):
    """Tokens [start, end) of ``request`` in the coming step; those before ``computed`` were computed before.

    With a ``redo`` they go through its layers only, and nothing is said unless it says so.
    """

    request: Request
    start: int
    end: int
    computed: int
    redo: LayerRecompute | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens in the step."""
        return self.end - self.start

    @property
    def completes(self) -> bool:
        """Return whether the step gives the request its next token."""
        return (self.redo is None or self.redo.says) and self.end == len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """Return whether the chunk is one generated token, processed for the first time."""
        return self.request.prompt_tokens <= self.start == self.computed

    @property
    def logprob_positions(self) -> range:
        """The places of its prompt whose logits are kept, as they say how likely the token behind each is.

        None where nobody asked, or where they were kept before: a request that was preempted reads its prompt again.
        """
        request = self.request
        silent = self.redo is not None and not self.redo.says
        if not request.sampling.prompt_logprobs or silent or request.drafting:
            return range(0)
        return range(max(self.start, len(request.prompt_logprobs)), min(self.end, request.prompt_tokens - 1))

    @property
    def draft_positions(self) -> range:
        """The places behind which drafts stand that the whole model verifies in the step."""
        request, count = self.request, len(self.request.tokens)
        if request.sampling.verify is None or request.drafting:  # rows of a swarm's server have nothing but a sampling
            return range(0)
        return range(max(self.start, count - request.draft_count - 1), min(self.end, count - 1))

    @property
    def token_spans(self) -> list[TokenSpan]:
        """Return the spans of the chunk that are computed again, prefilled and decoded, in the order of its tokens."""
        if self.decodes:
            return [TokenSpan(self.request.number, Kind.DECODE, self.start, self.end)]
        prompt = self.request.prompt_tokens
        computed, prefilled = min(self.computed, self.end), min(max(self.computed, prompt), self.end)
        cuts = (self.start, max(computed, self.start), max(prefilled, self.start), self.end)
        kinds = (Kind.RECOMPUTE, Kind.PREFILL, Kind.DECODE)
        return [
            TokenSpan(self.request.number, *line)
            for line in zip(kinds, cuts, cuts[1:], strict=False)
            if line[1] < line[2]
        ]


def split_decodes(chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], tuple[int, ...]]:
    """Split the chunks of a step: those that do more than decode, and the cached tokens of each that decodes."""
    others, contexts = [], []
    for chunk in chunks:
        if chunk.request.prompt_tokens <= chunk.start == chunk.computed:  # as ``decodes``, without a call: this is hot
            contexts.append(chunk.start)
        else:
            others.append(chunk)
    return others, tuple(contexts)


def shapes(chunks: Sequence[ScheduledChunk]) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Return what the cost of a step depends on: (cached, new) tokens of each prefill, and cached tokens of each
    decode."""
    others, contexts = split_decodes(chunks)
    return tuple((chunk.start, chunk.tokens) for chunk in others), contexts


class Phase(StrEnum):
    """The state of a request. A restoring one has its blocks again, but its keys and values are still on the way. Of a
    drafted one all is said that a stage may say, and it has no blocks until the whole model is there."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    RESTORING = "restoring"
    DRAFTED = "drafted"
    FINISHED = "finished"


@dataclass(frozen=True)
class Sampling:
    """The rules by which tokens are chosen and a request ends.

    ``temperature`` 0 is greedy; ``top_p`` keeps the likeliest tokens that make up this share; ``stop`` are token ids
    that end the request, and are part of its output, though none of its first ``min_tokens``. ``seed`` makes a
    request's draws its own: they do not depend on what else is in the batch. ``drawn`` tokens were drawn with it
    before, and are in the prompt. With ``logprobs`` each token's :class:`TokenLogprob` is kept, and so many of the
    likeliest with it; with ``prompt_logprobs`` those of the prompt's tokens too, but the first's, which nothing comes
    before. Requests share blocks of equal beginnings with those of the same ``cache_salt`` alone: how soon one is
    answered tells nobody else what it asked. ``top_k`` and ``min_p`` are as in :func:`firsttoken.engine.draws.draw`,
    ``logit_bias`` (token id, what is added to its logit) and the penalties as in
    :func:`firsttoken.engine.draws.choose`. With ``verify`` what a stage of a growing model says is a draft. Of a draw
    the whole model keeps, by "equal", what it would draw with the same random number, so that a seed gives one text;
    by "distribution" more, and the text is distributed as its own. Without ``drafts`` nobody reads these, and there
    are none where the prompt can follow the layers of the whole model as they arrive.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    drawn: int = 0
    cache_salt: str = ""
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    verify: Literal["equal", "distribution"] | None = None
    drafts: bool = True

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
        for name in ("drawn", "top_k", "min_tokens"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be 0 to 1, not {self.min_p}")
        if not 0 < self.repetition_penalty <= 1e6:
            raise RequestError(f"repetition_penalty must be above 0 and at most 1e6, not {self.repetition_penalty}")

    @property
    def adjusts(self) -> bool:
        """Return whether logits are changed before a token is chosen by them."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.logit_bias or (self.min_tokens and self.stop))

    def numbers(self, generated: int = 0) -> np.random.Generator:
        """The random numbers of its draws, one for each, behind those of the first ``generated`` tokens of the output.

        The first call in a process imports ``numpy.random``.
        """
        import numpy as np

        return np.random.Generator(np.random.PCG64(self.seed % 2**64).advance(self.drawn + generated))


GREEDY = Sampling()


class Request:
    """One request of the engine; ``arrival_s`` and ``times_s`` (of each output token) are on the engine's clock.

    It computes with the ``version`` that it began with, unless it ``moves`` to what is published while it is open.
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
        self.computed = 0  # tokens whose keys and values were ever there: above ``cached``, the marker of CPS 3.2.2
        self.moves = moves
        self.version: Any = None  # what it computes with, an engine.model_version.ModelVersion, since its first step
        self.redo: LayerRecompute | None = None  # before it goes on
        self.fell_back = ""  # or why tokens that were to come from elsewhere were computed after all
        self.blocks: list[int] = []
        self.keys: list[bytes] = []  # a salt, and the keys of the full blocks, where prefixes are shared
        self.published = 0  # of its blocks
        self.host: Any = None  # the executor's handle of the copy in host memory
        self.saved = 0  # of its first blocks, written through to that copy
        self.head = 0  # of its first tokens, computed again while the copy of the others comes back
        self.transfer: Any = None  # on its way back
        self.token_logprobs: list[TokenLogprob] = []  # of the output, where they were asked for
        self.prompt_logprobs: list[TokenLogprob] = []  # of the prompt from its second token on
        self.preemptions = 0
        self.draft_count = 0  # of its last tokens, which a stage has drafted
        self.draft_shares: list[np.ndarray] = []  # [vocabulary] that each was drawn from, where the rule weighs them
        self.correction: tuple[int, int] | None = None  # the first draft that does not stay, and what stands there
        self.failure: Exception | None = None  # why it ended early, where it was not the client's wish
        self._generator: np.random.Generator | None = None

    def salted(self, salt: str) -> str:
        """``salt``, which says what beside its tokens decides its keys and values, and the client's salt behind it."""
        cache_salt = self.sampling.cache_salt
        return f"{salt}\0{cache_salt}" if cache_salt else salt

    @property
    def output(self) -> list[int]:
        """Return the tokens generated so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def most_cached(self) -> int:
        """Tokens whose keys and values are in the pool at most; those of the last token are never needed."""
        return self.prompt_tokens + self.sampling.max_tokens - 1

    @property
    def remaining(self) -> int:
        """Tokens to process before the next one can be chosen, or before what is to be redone is; 1 while decoding."""
        return (self.redo.end if self.redo else self.head or len(self.tokens)) - self.cached

    @property
    def layer_share(self) -> float:
        """The share of the model's layers that its next tokens go through: less than 1 where some are redone.

        Tokens that follow arriving layers count as whole ones up to the last: nobody waits for a long step then.
        """
        some = self.redo is not None and self.version is not None and (self.redo.leave is None or self.redo.says)
        return len(self.redo.layers) / self.version.depth if some else 1.0

    @property
    def drafting(self) -> bool:
        """Return whether its next token is a draft, as it computes with a stage and is to be verified."""
        return self.sampling.verify is not None and self.version is not None and not self.version.whole

    @property
    def decoding(self) -> bool:
        """Return whether the prompt is cached, and all that was ever computed behind it."""
        return self.prompt_tokens <= self.cached == self.computed

    def chunk(self, tokens: int | None = None) -> ScheduledChunk:
        """Return the request's next ``tokens`` tokens (all that are to do) as the work of a step."""
        end = self.cached + (self.remaining if tokens is None else tokens)
        return ScheduledChunk(self, self.cached, end, self.computed, self.redo)

    def advance(self, end: int) -> None:
        """Note that the keys and values of its first ``end`` tokens are in the pool after a step."""
        self.cached = end
        self.computed = max(self.computed, end)
        if self.redo is not None and end >= self.redo.end:
            self.redo = None

    def switch_to(self, version: Any, redo: LayerRecompute | None = None) -> None:
        """Compute with ``version`` from now on, after what there is to ``redo``."""
        if redo is not None and redo is not self.redo:
            self.cached = 0
        self.version, self.redo = version, redo

    def forget(self) -> None:
        """Drop the note of cached keys and values, which are gone; what was computed will be computed again."""
        self.cached, self.head, self.redo = 0, 0, None

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def generator(self) -> np.random.Generator:
        """The source of this request's draws, made on first use: behind those of the output that it has by then."""
        if self._generator is None or self.sampling.verify == "equal":  # drafts may have been taken back
            self._generator = self.sampling.numbers(len(self.output))
        return self._generator

    def append(self, token: int, now_s: float) -> bool:
        """Take the next token, and return whether it is the last."""
        self.tokens.append(token)
        self.times_s.append(now_s)
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
