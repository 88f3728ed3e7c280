"""The paper's 14 small servers on two continents, and 12 equal ones: simulated, on what an A100 needed for a block.

A block of BLOOM-176B in 8 bits takes a GPU the time to read it and the time that the host needs to start its kernels.
The first follows from the card's memory bandwidth; the second is what the paper's A100 needed beyond it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from firsttoken.petals.routing import Reachable
from firsttoken_studies.petals.chain_costs import (
    BLOOM_BLOCKS,
    BLOOM_BYTES,
    BLOOM_HIDDEN,
    Network,
    published_compute_s,
)

_BLOCK_BYTES = BLOOM_BYTES / BLOOM_BLOCKS
_A100_GB_PER_S = 2039.0
_KEPT = 0.9  # of a card's memory for blocks, the rest for keys, values and the context of CUDA
_NEAR, _FAR = 0.02, 0.12  # seconds there and back within a continent and across the ocean
_RELAYED = 2.0  # times the way, behind a firewall


@dataclass(frozen=True)
class Card:
    """A consumer GPU by its maker's data sheet: ``memory_gb`` (1e9 bytes) and ``gb_per_s`` of its memory."""

    name: str
    memory_gb: float
    gb_per_s: float

    @property
    def blocks(self) -> int:
        """How many blocks of BLOOM fit in 8 bits."""
        return int(_KEPT * self.memory_gb * 1e9 / _BLOCK_BYTES)

    @property
    def block_s(self) -> float:
        """Seconds of a token in one block."""
        started_s = published_compute_s() / BLOOM_BLOCKS - _BLOCK_BYTES / (_A100_GB_PER_S * 1e9)
        return started_s + _BLOCK_BYTES / (self.gb_per_s * 1e9)


CARDS = (
    *[Card("RTX 3060", 12.9, 360.0)] * 2,
    *[Card("RTX 2080 Ti", 11.8, 616.0)] * 4,
    *[Card("RTX 3090", 25.8, 936.0)] * 2,
    *[Card("RTX A4000", 17.2, 448.0)] * 2,
    *[Card("RTX A5000", 25.8, 768.0)] * 4,
)


def fourteen() -> list[Reachable]:
    """The paper's cards side by side over all blocks, every other one across the ocean at 100 Mbit/s, the near ones at
    1 Gbit/s, every fourth behind a firewall; the last takes what is left."""
    servers, first = [], 0
    for number, card in enumerate(CARDS):
        far, stop = number % 2 == 1, min(BLOOM_BLOCKS, first + card.blocks)
        rtt = (_FAR if far else _NEAR) * (_RELAYED if number % 4 == 3 else 1.0)
        ping = Network(0.1 if far else 1.0, rtt).hop_s(BLOOM_HIDDEN)
        if first < stop:
            servers.append(Reachable(f"{number:02} {card.name}", range(first, stop), ping, 1 / card.block_s))
        first = stop
    return servers


def twelve(network: Network) -> list[Reachable]:
    """The three A100 cut into 12 equal servers on ``network``."""
    edges = [BLOOM_BLOCKS * part // 12 for part in range(13)]
    rate = BLOOM_BLOCKS / published_compute_s()
    ping = network.hop_s(BLOOM_HIDDEN)
    spans = itertools.pairwise(edges)
    return [Reachable(f"{number:02}", range(*span), ping, rate) for number, span in enumerate(spans)]
