"""Who has which blocks of a server's pool: the sequences of all sessions, within its limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from firsttoken.engine.blocks import BlockPool
from firsttoken.engine.request import GREEDY, Sampling
from firsttoken.engine.work import Work
from firsttoken.study.errors import BusyError, RequestError, SwarmError
from firsttoken.swarm.wire import Stretch


class LostError(SwarmError):
    """The server does not have the tokens before a step any more (or never had): send them again."""


class Rows(NamedTuple):
    """What stands for a request in the engine's step: nothing but where its keys and values are."""

    number: int
    blocks: list[int]
    tokens: range  # a server is never told the ids; positions stand in their place
    sampling: Sampling = GREEDY  # what is asked of logits, of which a server has none


@dataclass
class Tenant:
    """One sequence of a session: its blocks, and tokens whose keys and values are in them, from layer ``first`` on;
    ``trail`` are digests of what entered."""

    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    first: int = 0
    trail: list[bytes] = field(default_factory=list)


class Room:
    """At most ``sequences`` of at most ``context`` tokens each, in ``blocks`` blocks of ``block_tokens`` tokens."""

    def __init__(self, blocks: int, block_tokens: int, sequences: int, context: int) -> None:
        self.pool = BlockPool(blocks)
        self.block_tokens = block_tokens
        self.sequences = sequences
        self.context = context
        self.held = 0  # sequences, of all sessions

    def place(self, mine: dict[int, Tenant], stretches: Sequence[Stretch], first: int = 0) -> list[Work]:
        """The works of a step of a session whose sequences are ``mine``; takes the blocks that they need, or none.

        The step begins at layer ``first``: a client may leave layers out from then on, as they have come to it.
        Raises LostError for a step that begins behind what is cached, or at layers that were left out, RequestError
        beyond the context, BusyError where there is no room.
        """
        needs: list[int] = []
        for one in stretches:
            cached = mine[one.number].cached if one.number in mine else 0
            if one.start > cached:
                raise LostError(f"sequence {one.number} has {cached} tokens here, and the step begins at {one.start}")
            if one.start and first < mine[one.number].first:
                raise LostError(f"sequence {one.number} has nothing here of layer {first}, where the step begins")
            if one.end > self.context:
                raise RequestError(f"sequence {one.number} of {one.end} tokens exceeds the context of {self.context}")
            had = len(mine[one.number].blocks) if one.number in mine else 0
            needs.append(max(0, -(-one.end // self.block_tokens) - had))
        new = [one.number for one in stretches if one.number not in mine]
        if self.held + len(new) > self.sequences:
            raise BusyError(f"{self.held} sequences are open here, and at most {self.sequences} are taken")
        if (taken := self.pool.take(sum(needs))) is None:
            raise BusyError(f"the pool of {self.pool.count * self.block_tokens} tokens is full")
        self.held += len(new)
        works = []
        for one, need in zip(stretches, needs, strict=True):
            tenant = mine.setdefault(one.number, Tenant())
            tenant.blocks += [taken.pop() for _ in range(need)]
            tenant.cached, tenant.first = one.start, first  # what lies behind is written anew
            rows = Rows(one.number, list(tenant.blocks), range(self.context))  # a copy: the session may end meanwhile
            works.append(Work(rows, one.start, one.end, one.start))
        return works

    def computed(self, mine: dict[int, Tenant], stretches: Sequence[Stretch]) -> None:
        """A step has left the keys and values of ``stretches`` in the pool."""
        for one in stretches:
            if one.number in mine:
                mine[one.number].cached = one.end

    def leave(self, mine: dict[int, Tenant], numbers: Iterable[int]) -> None:
        """These sequences of a session are over; their blocks are free. Numbers that it does not have are passed by."""
        for number in numbers:
            if (tenant := mine.pop(number, None)) is not None:
                self.pool.give(tenant.blocks)
                self.held -= 1
