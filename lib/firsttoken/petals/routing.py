"""The fastest chain of servers through the layers, and large batches split over several (PETALS, section 3.2).

A client talks to each server of its chain itself, so that a chain takes the sum of its round trips and of its blocks'
times. The paper searches it by beam; an exact shortest path costs no more, as blocks come in one order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from firsttoken.study.errors import SwarmError


@dataclass(frozen=True)
class Reachable:
    """A server as a client sees it: the ``blocks`` that it holds, a round trip to it in ``ping_s`` seconds, and its
    ``throughput``, tokens a second through one block; one that is ``fixed`` never takes other blocks. Raises SwarmError
    for what no server can have."""

    name: str
    blocks: range
    ping_s: float
    throughput: float
    fixed: bool = False

    def __post_init__(self) -> None:
        if len(self.blocks) < 1 or self.blocks.step != 1 or self.blocks.start < 0:
            raise SwarmError(f"server {self.name}: blocks must be a range of layers, not {self.blocks}")
        if not 0 <= self.ping_s < math.inf or not 0 < self.throughput < math.inf:
            raise SwarmError(
                f"server {self.name}: ping {self.ping_s} s and {self.throughput} tokens/s are not what a server has"
            )

    @property
    def rate(self) -> float:
        """Tokens a second through all its blocks."""
        return self.throughput / len(self.blocks)


@dataclass(frozen=True)
class Hop:
    """``blocks`` of one ``server``, which may hold more."""

    server: Reachable
    blocks: range

    @property
    def row_s(self) -> float:
        """Seconds of a token in these blocks, without the way there and back."""
        return len(self.blocks) / self.server.throughput


def chain_s(chain: Sequence[Hop], tokens: int = 1) -> float:
    """Seconds that ``tokens`` at once take through ``chain``, one server after the other."""
    return sum(hop.server.ping_s + tokens * hop.row_s for hop in chain)


def best_chain(servers: Collection[Reachable], layers: range, without: Collection[str] = ()) -> list[Hop]:
    """The hops that bring one token through ``layers`` soonest, each block once, in order; of equals the fewest hops.

    ``without`` are names of servers that are not to be asked. Raises SwarmError that names the blocks nobody serves.
    """
    if len(layers) < 1 or layers.step != 1:
        raise SwarmError(f"a chain leads through a range of layers, not {layers}")
    usable = sorted(
        (candidate for candidate in servers if candidate.name not in without), key=lambda candidate: candidate.name
    )
    best: dict[int, tuple[float, int]] = {layers.stop: (0.0, 0)}
    step: dict[int, Hop] = {}
    for first in reversed(layers):
        for server in usable:
            if first not in server.blocks:
                continue
            for end in range(first + 1, min(server.blocks.stop, layers.stop) + 1):
                if end not in best:
                    continue
                hop = Hop(server, range(first, end))
                cost = (server.ping_s + hop.row_s + best[end][0], 1 + best[end][1])
                if first not in best or cost < best[first]:
                    best[first], step[first] = cost, hop
    if layers.start not in best:
        gaps = [block for block in layers if not any(block in server.blocks for server in usable)]
        raise SwarmError(unserved(gaps))
    chain: list[Hop] = []
    position = layers.start
    while position != layers.stop:
        hop = step[position]
        position = hop.blocks.stop
        if chain and chain[-1].server == hop.server:  # no way between them, and a sum that was rounded down
            hop = Hop(hop.server, range(chain.pop().blocks.start, position))
        chain.append(hop)
    check_cover([hop.blocks for hop in chain], layers)
    return chain


# Whether the parts of a way through a model are the whole of it: each of its layers, once, in order. Every composition
# of a swarm is held against this: the route that is planned, the servers that a step or a pass is sent to, those that
# it came through, and the layers that are lent to a start.


def gaps(spans: Iterable[range], layers: range) -> list[range]:
    """The parts of ``layers`` that none of ``spans`` has, in order."""
    missing, block = [], layers.start
    for span in sorted(spans, key=lambda covered: covered.start):
        if block < min(span.start, layers.stop):
            missing.append(range(block, min(span.start, layers.stop)))
        block = max(block, span.stop)
    return [*missing, range(block, layers.stop)] if block < layers.stop else missing


def check_cover(spans: Iterable[range], layers: range) -> None:
    """Raise SwarmError unless ``spans``, in the order in which they come, have each of ``layers`` once and no other."""
    block, spans = layers.start, list(spans)
    for span in spans:
        if span.start != block or not len(span):
            break
        block = span.stop
    else:
        if block == layers.stop:
            return
    needed = f"the model needs {span_names([layers])}, each once and in order"
    raise SwarmError(f"the servers have layers {span_names(spans)}, and {needed}")


def span_names(spans: Iterable[range]) -> str:
    """Return ``spans`` in the form that messages use, such as "[0, 4), [4, 8)"."""
    return ", ".join(f"[{span.start}, {span.stop})" for span in spans) or "none"


def unserved(blocks: Sequence[int]) -> str:
    """Return the message for a user about ``blocks`` that no server has."""
    return f"no server that answers has blocks {_block_names(blocks)}: start one with `firsttoken swarm serve`"


def _block_names(blocks: Sequence[int]) -> str:
    """``[2, 3, 4, 7]`` as "2 to 4, 7"."""
    spans: list[list[int]] = []
    for block in blocks:
        if spans and block == spans[-1][-1] + 1:
            spans[-1].append(block)
        else:
            spans.append([block])
    return ", ".join(f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
