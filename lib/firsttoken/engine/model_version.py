"""What requests compute with. A model that grows is several views of shared weights, and each request has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import ClassVar

from firsttoken.engine.decoder import Decoder, LocalSegment
from firsttoken.engine.hidden_state_cache import Edges
from firsttoken.engine.request import Redo, Request


class View:
    """A ``decoder``, what its requests keep in ``edges``, and which ``stage`` of a model it is (0: it has none).

    ``key`` tells it from every other view: keys and values are shared only under one.
    """

    _made: ClassVar[count] = count()

    def __init__(self, decoder: Decoder, edges: Edges | None = None, stage: int = 0) -> None:
        self.decoder = decoder
        self.edges = edges
        self.stage = stage
        self.key = next(self._made)

    def forget(self, request: Request) -> None:
        """Drop what is kept of it beside its blocks."""
        self.decoder.drop(request.number)
        if self.edges is not None:
            self.edges.drop(request.number)

    def redo(self, request: Request, layers: range) -> Redo:
        """All that ``request`` has cached through ``layers`` again, from the hidden states that are kept of it here.

        Everything again of one that is still about an earlier change, and of one whose first tokens never entered the
        first of ``layers``: their keys and values were brought, or an earlier change began above. Raises RequestError
        where nothing is kept there of anybody.
        """
        if request.redo is not None:
            return Redo(range(self.decoder.depth), request.redo.end)
        if not layers.start:
            return Redo(layers, request.cached)
        edges = self.edges or Edges(())
        if layers.start in edges.layers and not edges.whole(request.number, layers.start, request.cached):
            return Redo(range(self.decoder.depth), request.cached)
        return Redo(layers, request.cached, edges.of(request.number, layers.start)[:, : request.cached])

    def take_over(self, request: Request) -> None:
        """Keep from now on what the request's own view has kept of it so far."""
        if self.edges is not None and request.view.edges is not None:
            self.edges.adopt(request.number, request.view.edges)
        request.view.forget(request)

    def fuse(self) -> Iterator[None]:
        """Fuse the layers that are here as :meth:`LocalSegment.fuse` does, and then pack the head."""
        for segment in self.decoder.segments:
            if isinstance(segment, LocalSegment):
                yield from segment.fuse()
        self.decoder.pack_head()
        yield


Transition = Callable[[View, View], range | None]
"""Which layers a request computes again when it moves from one view to another; None where it stays."""
