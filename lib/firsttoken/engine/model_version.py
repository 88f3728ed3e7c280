"""Versions of a model, which requests compute with. A model that grows is several views of shared weights, and each
request has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import ClassVar

from torch import nn

from firsttoken.engine.attention import Attend, use_paged_attention
from firsttoken.engine.decoder import Decoder, LocalSegment
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.request import LayerRecompute, Request


class ModelVersion:
    """A ``decoder``, what its requests keep in ``hidden_cache``, and its ``stage`` of a model (0: it has none).

    A variant has the weights of its ``base``, and an adapter: a step may take requests of both. ``key`` tells it from
    every other version: keys and values are shared only under one key. ``attend`` is how its attention is computed,
    None as the executor's. It is ``whole`` unless better versions are to come. While its layers arrive ``arrival`` says
    how many of the first ones are there.
    """

    whole = True
    arrival: Callable[[], int] | None = None

    _keys: ClassVar[count] = count()

    def __init__(
        self,
        decoder: Decoder,
        hidden_cache: HiddenStateCache | None = None,
        stage: int = 0,
        base: ModelVersion | None = None,
    ) -> None:
        self.decoder = decoder
        self.hidden_cache = hidden_cache
        self.stage = stage
        self.base = base
        self.attend: type[Attend] | None = None
        self.key = next(self._keys)

    @property
    def depth(self) -> int:
        return self.decoder.depth

    @property
    def arrived(self) -> int:
        """Return how many of its first layers compute already."""
        return self.depth if self.arrival is None else self.arrival()

    def forget(self, request: Request) -> None:
        """Drop what is kept of the request beside its blocks."""
        self.decoder.drop(request.number)
        if self.hidden_cache is not None:
            self.hidden_cache.drop(request.number)

    def redo(self, request: Request, layers: range) -> LayerRecompute:
        """Return what ``request`` has to compute again through ``layers``, from the hidden states that are kept of it
        here.

        That is everything for a request that has not finished an earlier change, or whose first tokens never entered
        the first of ``layers`` because they were brought or an earlier change began above. Raises RequestError where no
        hidden states are kept there.
        """
        if request.redo is not None:
            return LayerRecompute(range(self.depth), request.redo.end)
        if not layers.start:
            return LayerRecompute(layers, request.cached)
        cache, number, cached = self.hidden_cache or HiddenStateCache(()), request.number, request.cached
        if layers.start in cache.layers and not cache.covers(number, layers.start, cached):
            return LayerRecompute(range(self.depth), cached)
        return LayerRecompute(layers, cached, cache.of(number, layers.start)[:, :cached])

    def adopt(self, request: Request) -> None:
        """Keep from now on what the request's own view has kept of it so far."""
        boundary_cache = request.version.hidden_cache
        # variants of one base keep theirs in one place
        if boundary_cache is not None and boundary_cache is self.hidden_cache:
            request.version.decoder.drop(request.number)
            return
        if self.hidden_cache is not None and boundary_cache is not None:
            self.hidden_cache.take_from(request.number, boundary_cache)
        request.version.forget(request)

    def fuse(self) -> Iterator[None]:
        """Fuse the layers that are here as :meth:`LocalSegment.fuse` does, and then pack the head."""
        for segment in self.decoder.segments:
            if isinstance(segment, LocalSegment):
                yield from segment.fuse()
        self.decoder.pack_head()
        yield


def fused_version(model: nn.Module) -> ModelVersion:
    """``model``, which is let go of, as a version with the products that are the fastest here. It is fused before any
    request begins with it, as that changes how its numbers are rounded."""
    use_paged_attention(model)
    version = ModelVersion(Decoder(model), stage=1)
    model.model.layers = nn.ModuleList()
    for _ in version.fuse():
        pass
    return version
