"""Which blocks a server takes, and when it gives them up for others (PETALS, section 3.2).

A swarm is as fast as its slowest block. Who joins takes the interval that has the least throughput; who serves asks
now and then whether the swarm would gain enough if it, and whoever wants to after it, moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from firsttoken.petals.routing import Reachable
from firsttoken.study.errors import SwarmError

_ROUNDS = 50  # of foreseen moves: more than a swarm of hundreds needs to come to rest
# A server's share is taken off a little too large and put back a little too small: of equal places it prefers the one
# it has, and sums of floats that differ in their last bit move nobody.
_SLACK = 1e-6


def block_rates(servers: Iterable[Reachable], depth: int) -> np.ndarray:
    """Tokens a second through each of ``depth`` blocks [depth], all its servers together."""
    rates = np.zeros(depth)
    for server in servers:
        rates[server.blocks.start : server.blocks.stop] += server.rate
    return rates


def swarm_rate(servers: Iterable[Reachable], depth: int) -> float:
    """Tokens a second that many clients together get through all blocks: those of the slowest one."""
    return float(block_rates(servers, depth).min())


def most_rate(servers: Iterable[Reachable], depth: int) -> float:
    """No placement of these servers is faster: each gives its throughput to as many blocks as it holds."""
    return sum(server.throughput for server in servers) / depth


def interval_to_join(servers: Iterable[Reachable], depth: int, count: int) -> range:
    """The ``count`` contiguous blocks of ``depth`` that need another server most.

    That is the interval whose rates, sorted, come first from the least on; of equals the first. Raises SwarmError for a
    count that does not fit.
    """
    if not 1 <= count <= depth:
        raise SwarmError(f"a server of {count} blocks does not fit a model of {depth}: choose 1 to {depth}")
    return _neediest(block_rates(servers, depth), count)


@dataclass(frozen=True)
class Rebalancing:
    """A server moves if the swarm's rate is below ``quality`` of what it would become; the paper's code has 0.75.

    What it would become is foreseen by letting all servers move, whoever asks first. Nobody moves a swarm that has
    ``enough`` of what no placement exceeds. Raises SwarmError for shares outside 0..1.
    """

    quality: float = 0.75
    enough: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.quality <= 1 and 0 < self.enough <= 1):
            raise SwarmError(f"quality and enough must be above 0 and at most 1, not {self.quality} and {self.enough}")

    def move(self, name: str, servers: Collection[Reachable], depth: int) -> range | None:
        """The blocks that server ``name`` should hold instead, or None where it should stay.

        Raises SwarmError when it is not among ``servers``.
        """
        placed = sorted(servers, key=lambda server: server.name)
        current = next((server for server in placed if server.name == name), None)
        if current is None:
            raise SwarmError(f"server {name} is not announced, and cannot move")
        now = swarm_rate(placed, depth)
        without = swarm_rate((server for server in placed if server is not current), depth)
        if (now > 0 and without <= 0) or now >= min(self.quality, self.enough) * most_rate(placed, depth):
            return None  # the only one that holds some block, or nothing could gain enough
        foreseen = self._foreseen(current, placed, depth)
        then = swarm_rate(foreseen, depth)
        target = next(server.blocks for server in foreseen if server.name == name)
        return target if target != current.blocks and then > 0 and now < self.quality * then else None

    def _foreseen(self, current: Reachable, placed: Sequence[Reachable], depth: int) -> Sequence[Reachable]:
        """The servers where they would be, if ``current`` moved and those who want to after it."""
        return settled((current, *(server for server in placed if server is not current)), depth)


@lru_cache(maxsize=256)  # between two changes of the records every server asks the same
def settled(servers: tuple[Reachable, ...], depth: int) -> tuple[Reachable, ...]:
    """``servers`` after each that is not fixed, in turn, has gone where it is needed most, until none wants to."""
    placed = list(servers)
    rates = block_rates(placed, depth)
    for _ in range(_ROUNDS):
        moved = False
        for index, server in enumerate(placed):
            target = server.blocks if server.fixed else _replaced(rates, server)
            if target != server.blocks:
                rates[server.blocks.start : server.blocks.stop] -= server.rate
                rates[target.start : target.stop] += server.rate
                placed[index], moved = replace(server, blocks=target), True
        if not moved:
            break
    return tuple(placed)


def _replaced(rates: np.ndarray, server: Reachable) -> range:
    """Return the blocks that ``server``, which is counted in ``rates``, would join with if it came new."""
    without = rates.copy()
    without[server.blocks.start : server.blocks.stop] -= server.rate * (1 + _SLACK)
    return _neediest(without, len(server.blocks))


def _neediest(rates: np.ndarray, count: int) -> range:
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(rates, count), axis=1)
    start = int(np.lexsort(windows.T[::-1])[0])
    return range(start, start + count)
