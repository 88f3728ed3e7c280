"""Hidden states at the edge of a layer, by request: what recomputing from that layer on begins with.

A boundary kept for a stage change, DroidSpeak's E-cache and the history that PETALS keeps for a server that may fail
are this one thing. A token costs hidden size times dtype bytes at each layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from firsttoken.engine.request import ScheduledChunk
from firsttoken.study.errors import RequestError


class HiddenStateCache:
    """Keeps what enters each of ``layers`` (0-based), of every request until it is over."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = frozenset(layers)
        self._kept: dict[int, dict[int, _CachedStates]] = defaultdict(dict)

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        return sum(kept.rows.nbytes for layers in self._kept.values() for kept in layers.values())

    def enter(self, layer: int, hidden: Tensor, chunks: Sequence[ScheduledChunk]) -> None:
        """``hidden`` [1, tokens, hidden] of ``chunks``, end to end, is about to enter ``layer``."""
        if layer not in self.layers:
            return
        first = 0
        for chunk in chunks:
            self.keep(chunk.request.number, layer, chunk.start, hidden[0, first : first + chunk.tokens])
            first += chunk.tokens

    def keep(self, request: int, layer: int, start: int, rows: Tensor) -> None:
        """``rows`` [tokens, hidden] of the tokens from ``start`` on enter ``layer``, which is one of those kept."""
        kept = self._kept[request]
        if layer not in kept:
            kept[layer] = _CachedStates(rows[:0])
        kept[layer].write(start, rows)

    def whole(self, request: int, layer: int, tokens: int) -> bool:
        """Whether what entered ``layer`` was kept of all its first ``tokens`` tokens, not of later ones only."""
        kept = self._kept.get(request, {}).get(layer)
        return kept is not None and kept.start == 0 and kept.end >= tokens

    def reaches(self, request: int, layer: int, start: int) -> bool:
        """Whether what entered ``layer`` was kept of its tokens from ``start`` on."""
        kept = self._kept.get(request, {}).get(layer)
        return kept is not None and kept.start <= start

    def of(self, request: int, layer: int, start: int = 0) -> Tensor:
        """What entered ``layer``, [1, tokens, hidden], from the request's token ``start`` to its latest.

        Raises RequestError where this is not kept, or the first tokens came with blocks that others had computed.
        """
        kept = self._kept.get(request, {}).get(layer)
        if kept is None:
            held = ", ".join(map(str, sorted(self.layers))) or "none"
            raise RequestError(f"no hidden states of request {request} are kept at layer {layer} (layers: {held})")
        if kept.start > start:
            raise RequestError(
                f"request {request} has no hidden states of its first {kept.start} tokens at layer {layer}: they came "
                "with shared blocks; set share_prefixes to False to keep hidden states"
            )
        return kept.rows[None, start : kept.end]

    def adopt(self, request: int, other: HiddenStateCache) -> None:
        """Take over what ``other`` has kept of the request, at the layers that are kept here too."""
        kept = {layer: rows for layer, rows in other._kept.get(request, {}).items() if layer in self.layers}
        if kept:
            self._kept[request] = kept

    def drop(self, request: int) -> None:
        """Drop what is kept of the request, as it is over."""
        self._kept.pop(request, None)


class _CachedStates:
    """``rows`` [capacity, hidden], of which those of tokens ``start`` to ``end`` are written."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.clone()
        self.start = self.end = 0

    def write(self, start: int, states: Tensor) -> None:
        """``states`` [tokens, hidden] of the tokens from ``start`` on; those behind them are not right any more."""
        end = start + len(states)
        if start > self.end or start < self.start:
            self.start = start
        if end > len(self.rows):
            more = self.rows.new_empty(max(end, 2 * len(self.rows)) - len(self.rows), states.shape[1])
            self.rows = torch.cat([self.rows, more])
        self.rows[start:end] = states
        self.end = end
