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
        self._entries: dict[int, dict[int, _CachedStates]] = defaultdict(dict)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are held now."""
        return sum(entry.rows.nbytes for layers in self._entries.values() for entry in layers.values())

    def enter(self, layer: int, hidden: Tensor, chunks: Sequence[ScheduledChunk]) -> None:
        """Keep ``hidden`` [1, tokens, hidden] of ``chunks``, end to end, which is about to enter ``layer``."""
        if layer not in self.layers:
            return
        first = 0
        for chunk in chunks:
            self.keep(chunk.request.number, layer, chunk.start, hidden[0, first : first + chunk.tokens])
            first += chunk.tokens

    def keep(self, request: int, layer: int, start: int, rows: Tensor) -> None:
        """Keep ``rows`` [tokens, hidden] of the tokens from ``start`` on, which enter ``layer``, one of those kept."""
        by_layer = self._entries[request]
        if layer not in by_layer:
            by_layer[layer] = _CachedStates(rows[:0])
        by_layer[layer].write(start, rows)

    def covers(self, request: int, layer: int, tokens: int) -> bool:
        """Return whether the states that entered ``layer`` are kept of all the first ``tokens`` tokens, not of later
        ones only."""
        entry = self._entries.get(request, {}).get(layer)
        return entry is not None and entry.start == 0 and entry.end >= tokens

    def of(self, request: int, layer: int, start: int = 0) -> Tensor:
        """Return the states that entered ``layer``, [1, tokens, hidden], from the request's token ``start`` to its
        latest.

        Raises RequestError where these are not kept, or the first tokens came with blocks that others had computed.
        """
        entry = self._entries.get(request, {}).get(layer)
        if entry is None:
            held = ", ".join(map(str, sorted(self.layers))) or "none"
            raise RequestError(f"no hidden states of request {request} are kept at layer {layer} (layers: {held})")
        if entry.start > start:
            raise RequestError(
                f"request {request} has no hidden states of its first {entry.start} tokens at layer {layer}: they came "
                "with shared blocks; set share_prefixes to False to keep hidden states"
            )
        return entry.rows[None, start : entry.end]

    def take_from(self, request: int, other: HiddenStateCache) -> None:
        """Take over what ``other`` has kept of the request, at the layers that are kept here too."""
        taken = {layer: rows for layer, rows in other._entries.get(request, {}).items() if layer in self.layers}
        if taken:
            self._entries[request] = taken

    def drop(self, request: int) -> None:
        """Drop what is kept of the request, as it is over."""
        self._entries.pop(request, None)


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
