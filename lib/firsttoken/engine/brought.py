"""A cache from elsewhere: keys and values of how a request begins, computed by another model or at another time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from firsttoken.engine.executor import Executor
from firsttoken.engine.request import Request
from firsttoken.engine.work import Redo
from firsttoken.study.errors import CacheError, FirstTokenError, RequestError

if TYPE_CHECKING:
    from torch import Tensor


class PrefixSource(Protocol):
    """What is stored of the first ``tokens`` tokens of a request; the layers in ``redo`` are computed again.

    It brings the hidden states that enter the first of these, if they are not the embedding's, and then every other
    layer's keys and values. The engine's thread asks it between two steps and never waits for it.
    """

    tokens: int
    redo: range

    def begin(self) -> None:
        """Let it come."""

    def edge(self) -> Tensor | None:
        """The hidden states [1, tokens or more, hidden] that enter the first of ``redo``, once they are there.

        Raises FirstTokenError when they will not come any more.
        """

    def arrived(self) -> list[tuple[int, Tensor]]:
        """(layer, keys and values [2, 1, kv_heads, tokens or more, head_dim]) that have come since this was last asked.

        Raises FirstTokenError when no more will come, and not all has.
        """

    @property
    def complete(self) -> bool:
        """Whether ``arrived`` has told of every layer that is not computed again."""

    def close(self) -> None:
        """Nothing more is wanted of it; may be called twice."""


class CoveredPrefix:
    """``source``, held to what it says: each layer of a model of ``depth`` layers that is not computed again comes
    once, with keys and values of all its tokens, before it is complete. ``arrived`` and ``complete`` raise CacheError
    where it is not so.

    Raises RequestError for layers to compute again that the model does not have.
    """

    def __init__(self, source: PrefixSource, depth: int) -> None:
        self.tokens, self.redo = source.tokens, source.redo
        if not 0 <= self.redo.start <= self.redo.stop <= depth or self.redo.step != 1:
            raise RequestError(f"a stored prefix computes {self.redo} again, and the model has layers [0, {depth})")
        self._source = source
        self._left = set(range(depth)) - set(self.redo)

    def begin(self) -> None:
        """As the source."""
        self._source.begin()

    def edge(self) -> Tensor | None:
        """As the source."""
        return self._source.edge()

    def arrived(self) -> list[tuple[int, Tensor]]:
        """As the source, each layer once and whole."""
        came = self._source.arrived()
        for layer, kv in came:
            if layer not in self._left:
                raise CacheError(f"a stored prefix brought layer {layer}, which had come or was not to come")
            if kv.dim() != 5 or kv.shape[3] < self.tokens:
                raise CacheError(f"a stored prefix brought {list(kv.shape)} of {self.tokens} tokens for layer {layer}")
            self._left.remove(layer)
        return came

    @property
    def complete(self) -> bool:
        """As the source, which has brought every layer then."""
        if (complete := self._source.complete) and self._left:
            raise CacheError(f"a stored prefix ended without layer {min(self._left)}")
        return complete

    def close(self) -> None:
        """As the source."""
        self._source.close()


class Bringing:
    """Takes in what the sources of requests bring, and says when a request can run."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def look(self, request: Request) -> bool:
        """Take in what has come for ``request``; whether it has something to compute now.

        That is what it computes again, as soon as this can begin, and what follows its prefix, once that is whole.
        Where the source fails, or brings what does not fit, everything is computed from the tokens, and
        ``request.fell_back`` says why.
        """
        source = request.source
        try:
            for layer, kv in source.arrived():
                self._executor.fill(request, layer, kv[..., : source.tokens, :])
            if request.computed < source.tokens:
                return self._begun(request, source)
            if request.redo is None and source.complete:
                request.give_up_source()
            return request.redo is not None or request.source is None
        except FirstTokenError as error:
            request.forget()
            request.computed, request.fell_back = 0, str(error)
            return True

    def _begun(self, request: Request, source: PrefixSource) -> bool:
        if not source.redo:
            if source.complete:
                request.advance(source.tokens)
                request.give_up_source()
            return request.source is None
        edge = source.edge() if source.redo.start else None
        if source.redo.start and edge is None:
            return False
        hidden = None if edge is None else self._executor.edge_of(edge, source.tokens)
        request.computed = source.tokens
        request.redo = Redo(source.redo, source.tokens, hidden)
        return True
