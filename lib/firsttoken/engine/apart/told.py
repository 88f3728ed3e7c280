"""What a worker knows of each request, so that a step tells it no more than what is new."""

from __future__ import annotations

from dataclasses import dataclass, field

from firsttoken.engine.apart.wire import Fresh, ToldWork, sampling_told
from firsttoken.engine.request import Request
from firsttoken.engine.swap.spans import Span
from firsttoken.engine.work import Work


@dataclass
class _Known:
    tokens: int = 0
    blocks: list[int] = field(default_factory=list)


class Told:
    """Of one worker: what it knows, and what it is to forget with the next order."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._over: list[int] = []
        self._dropped: list[tuple[int, int]] = []

    def work(self, work: Work) -> ToldWork:
        """``work`` for the worker, which knows it then."""
        request, fresh = work.request, None
        known = self._known.get(request.number)
        if known is None:
            known = self._known[request.number] = _Known()
            fresh = Fresh(request.prompt_tokens, len(request.prompt_chances), sampling_told(request.sampling))
        kept = len(known.blocks)
        if known.blocks != request.blocks[:kept]:
            kept = 0
        told, tokens, blocks = known.tokens, request.tokens[known.tokens :], request.blocks[kept:]
        known.tokens += len(tokens)
        known.blocks[kept:] = blocks
        return ToldWork(request.number, work.start, work.end, work.computed, told, tokens, kept, blocks, fresh)

    def lies_in(self, request: Request) -> None:
        """It has been told of all blocks of ``request``."""
        self._known[request.number].blocks = list(request.blocks)

    def over(self, request: Request) -> None:
        """``request`` is over."""
        if self._known.pop(request.number, None) is not None:
            self._over.append(request.number)

    def dropped(self, host: Span) -> None:
        """Nobody needs ``host`` any more."""
        self._dropped.append((host.start, host.blocks))

    def forgotten(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Requests and spans that went since this was last asked."""
        gone = self._over, self._dropped
        self._over, self._dropped = [], []
        return gone
