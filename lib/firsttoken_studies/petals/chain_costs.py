"""What a step takes through a chain of servers and by offloading, and what the paper's Table 3 says of both.

A client that talks to each server itself pays a round trip and the hidden states there and back for each. Offloading,
as the paper bounds it, pays the bytes of all weights over its link, and nothing for computing (section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firsttoken.petals.routing import Hop
from firsttoken.petals.wire8 import BLOCK
from firsttoken.study.errors import ProfileError

BLOOM_BYTES, BLOOM_HIDDEN, BLOOM_BLOCKS = 176e9, 14336, 70  # in 8 bits
# Steps a second of a client with 128 tokens, as the authors' README has them for three servers with an A100 each, and
# the two bounds of offloading.
PUBLISHED_STEPS_PER_S = {"1 Gbit/s, 5 ms": 1.71, "100 Mbit/s, 5 ms": 1.66, "100 Mbit/s, 100 ms": 1.23}
OFFLOADING_GBIT_PER_S = {"PCIe 4.0 x16": 256.0, "behind a switch": 128.0, "SSD": 64.0}
PUBLISHED_SERVERS = 3


@dataclass(frozen=True)
class Network:
    """A link to each server, ``gbit_per_s`` each way and ``rtt_s`` seconds there and back. ProfileError for none."""

    gbit_per_s: float
    rtt_s: float

    def __post_init__(self) -> None:
        if not self.gbit_per_s > 0 or not self.rtt_s >= 0:
            raise ProfileError(f"a network has a rate and a latency, not {self.gbit_per_s} Gbit/s and {self.rtt_s} s")

    def hop_s(self, hidden: int, tokens: int = 1) -> float:
        """Seconds on the way to one server and back, with ``tokens`` packed states of ``hidden`` values each way."""
        states = 2 * tokens * (hidden + 4 * -(-hidden // BLOCK))
        return self.rtt_s + 8 * states / (self.gbit_per_s * 1e9)


NETWORKS = {
    "1 Gbit/s, 5 ms": Network(1.0, 0.005),
    "100 Mbit/s, 5 ms": Network(0.1, 0.005),
    "100 Mbit/s, 100 ms": Network(0.1, 0.1),
}


def swarm_s(compute_s: float, servers: int, hidden: int, network: Network, tokens: int = 1) -> float:
    """Seconds of ``tokens`` at once through ``servers`` in turn that compute for ``compute_s`` together."""
    return compute_s + servers * network.hop_s(hidden, tokens)


def offload_s(weight_bytes: float, gbit_per_s: float) -> float:
    """The least that a step takes when all weights come over a link of ``gbit_per_s``."""
    return 8 * weight_bytes / (gbit_per_s * 1e9)


def published_compute_s() -> float:
    """What BLOOM's blocks took on the paper's three servers: their fastest row without its network."""
    network = "1 Gbit/s, 5 ms"
    return 1 / PUBLISHED_STEPS_PER_S[network] - PUBLISHED_SERVERS * NETWORKS[network].hop_s(BLOOM_HIDDEN)


def crossover_bytes(link_gbit_per_s: float, servers: int, hidden: int, network: Network) -> float:
    """Bytes of weights from which on a swarm is faster than offloading, which computes as fast and hides nothing."""
    return servers * network.hop_s(hidden) * link_gbit_per_s * 1e9 / 8


def clients_step_s(chain: Sequence[Hop], clients: int) -> float:
    """Mean seconds of a step when ``clients`` at once go round ``chain`` without end.

    Exact mean value analysis of a closed network (Reiser and Lavenberg, 1980): a server takes one step at a time, first
    come first served, and steps vary in length as exponential ones do; the way there and back keeps nobody waiting.
    """
    queued = [0.0] * len(chain)
    way_s = sum(hop.server.ping_s for hop in chain)
    step_s = 0.0
    for count in range(1, clients + 1):
        inside = [hop.row_s * (1 + before) for hop, before in zip(chain, queued, strict=True)]
        step_s = way_s + sum(inside)
        queued = [count / step_s * seconds for seconds in inside]
    return step_s
