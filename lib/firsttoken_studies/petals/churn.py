"""A swarm in which servers come, leave and die, simulated second by second on the rules that real servers follow.

Everybody decides on records: what others announced, ``gossip_s`` ago or earlier, of the dead as well until they expire.
Who wants to move announces it, waits, and goes only if the move is still wanted with all counted who announced before.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from firsttoken.petals.placement import Rebalancing, block_rates, interval_to_join, most_rate
from firsttoken.petals.routing import Reachable
from firsttoken.study.errors import ProfileError


@dataclass(frozen=True)
class ChurnConfig:
    """A swarm over ``depth`` blocks, seconds throughout.

    Every server asks once a ``period_s`` whether to move, by ``rule``; with ``hears_s`` it also asks within as many
    after somebody came or went. A changed record is seen by others after ``gossip_s``, one that is not renewed is
    dropped after ``expiry_s``. Blocks take ``load_s`` to load, in which a server serves nothing; between announcing a
    move and making it lie ``settle_s``. Raises ProfileError for impossible times.
    """

    depth: int
    period_s: float = 120.0
    rule: Rebalancing = field(default_factory=Rebalancing)
    hears_s: float = 0.0
    gossip_s: float = 1.0
    settle_s: float = 2.0
    expiry_s: float = 30.0
    load_s: float = 5.0

    def __post_init__(self) -> None:
        if self.depth < 1 or min(self.period_s, self.expiry_s) <= 0 or min(self.gossip_s, self.settle_s) < 0:
            raise ProfileError("churn: depth, period_s and expiry_s lie above 0, gossip_s and settle_s not below it")
        if self.load_s < 0 or self.load_s + self.settle_s >= self.period_s:
            raise ProfileError("churn: a server must settle and load within its period; raise period_s")


@dataclass
class _Simulated:
    """What is true of a server, and what it ``said``: (when, its record or None for gone), oldest first."""

    record: Reachable
    said: list[tuple[float, Reachable | None]]
    serves: bool = False
    alive: bool = True
    expires_s: float = float("inf")  # of a dead one
    wants: tuple[float, str] | None = None  # when it announced a move that it has not made, and who it is


@dataclass
class Churn:
    """The swarm at ``now_s``.

    ``history`` holds (second, rate, most that its living servers could have, unserved blocks) after each change;
    ``in_vain`` counts the moves that another, announced before and not seen yet, had made needless.
    """

    config: ChurnConfig
    seed: int = 0
    now_s: float = 0.0
    moves: int = 0
    in_vain: int = 0
    history: list[tuple[float, float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._servers: dict[str, _Simulated] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def living(self) -> list[Reachable]:
        """The records of the servers that are there, loading ones too."""
        return [server.record for server in self._servers.values() if server.alive]

    def join(self, name: str, count: int, throughput: float) -> None:
        """A server of ``count`` blocks comes, chooses them by what it sees, and again when it has waited for others."""
        blocks = interval_to_join(self.seen(), self.config.depth, count)
        record = Reachable(name, blocks, 0.0, throughput)
        self._servers[name] = _Simulated(record, [(self.now_s, record)], wants=(self.now_s, name))
        self._after(self.config.settle_s, lambda: self._join(name))
        self._after(self.config.settle_s + self._rng.uniform(0, self.config.period_s), lambda: self._check(name))
        self._spread(self.config.gossip_s + self.config.settle_s)
        self._note()

    def leave(self, name: str, *, says_so: bool) -> None:
        """Server ``name`` is gone; one that does not say so is seen until its last record expires."""
        server = self._servers[name]
        server.alive = server.serves = False
        if says_so:
            server.said.append((self.now_s, None))
        else:
            server.expires_s = self.now_s + self.config.expiry_s * self._rng.uniform(0.5, 1)  # renewed twice an expiry
        self._spread(self.config.gossip_s if says_so else server.expires_s - self.now_s)
        self._note()

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._agenda)
            act()
        self.now_s = until_s

    def seen(
        self, without: str = "", before: tuple[float, str] | None = None, gossip_s: float | None = None
    ) -> list[Reachable]:
        """The records that anybody sees now, except of ``without``; of moves that are only announced those that were
        earlier than ``before``, of one second those of the first name. News travel for ``gossip_s``."""
        found, latest = [], self.now_s - (self.config.gossip_s if gossip_s is None else gossip_s)
        for name, server in self._servers.items():
            if name == without or self.now_s >= server.expires_s:
                continue
            later = before is not None and server.wants is not None and server.wants > before
            said = server.said[:-1] if later else server.said
            record = next((what for when, what in reversed(said) if when <= latest), None)
            if record is not None:
                found.append(record)
        return found

    def _join(self, name: str) -> None:
        server = self._servers[name]
        if not server.alive:
            return
        blocks = interval_to_join(self.seen(name, server.wants), self.config.depth, len(server.record.blocks))
        server.record, server.wants = replace(server.record, blocks=blocks), None
        server.said.append((self.now_s, server.record))
        self._after(self.config.load_s, lambda: self._ready(name))

    def _spread(self, after_s: float) -> None:
        """Everybody sees in ``after_s`` that somebody came or went, and asks soon after."""
        if self.config.hears_s:
            for name, server in self._servers.items():
                wait = after_s + self._rng.uniform(0, self.config.hears_s)
                if server.alive:
                    self._after(wait, lambda name=name: self._ask(name))

    def _check(self, name: str) -> None:
        if self._servers[name].alive:
            self._after(self.config.period_s, lambda: self._check(name))
            self._ask(name)

    def _ask(self, name: str) -> None:
        server = self._servers[name]
        if server.wants is not None:
            return
        target = self._wanted(server, self.seen(without=name)) if server.serves else None
        if target is not None:
            server.said.append((self.now_s, replace(server.record, blocks=target)))
            server.wants = (self.now_s, name)
            self._after(self.config.settle_s, lambda: self._decide(name, target))

    def _decide(self, name: str, target: range) -> None:
        """Move, or take the announcement back: somebody who was earlier fills the gap."""
        server = self._servers[name]
        if not server.alive:
            return
        seen, now = self.seen(name, server.wants), self.seen(name, server.wants, gossip_s=0.0)
        server.wants = None
        wanted = self._wanted(server, seen)
        if wanted is None:
            server.said.append((self.now_s, server.record))
            return
        known = {one.name for one in seen}
        self.in_vain += self._wanted(server, [one for one in now if one.name in known]) is None
        self.moves += 1
        server.record = replace(server.record, blocks=target)
        server.serves = False
        self._after(self.config.load_s, lambda: self._ready(name))
        self._note()

    def _wanted(self, server: _Simulated, others: list[Reachable]) -> range | None:
        return self.config.rule.move(server.record.name, [*others, server.record], self.config.depth)

    def _ready(self, name: str) -> None:
        self._servers[name].serves = self._servers[name].alive
        self._note()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (self.now_s + seconds, self._count, act))

    def _note(self) -> None:
        rates = block_rates((one.record for one in self._servers.values() if one.serves), self.config.depth)
        most = most_rate(self.living, self.config.depth)
        self.history.append((self.now_s, float(rates.min()), most, int((rates <= 0).sum())))
