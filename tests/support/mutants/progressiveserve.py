"""Wrong versions of what ProgressiveServe describes."""

from __future__ import annotations

from mutants.running import Mutation


def _deepest_block() -> None:
    from firsttoken.progressive import distance

    def choose_block(distances: distance.Distances, size: int, tokens: str = "last") -> list[int]:
        return list(range(distances.depth - size, distances.depth))

    distance.choose_block = choose_block


def _most_turning_block() -> None:
    from firsttoken.progressive import distance

    def choose_block(distances: distance.Distances, size: int, tokens: str = "last") -> list[int]:
        start = int(distances.block(size, tokens).mean(0).argmax())
        return list(range(start, start + size))

    distance.choose_block = choose_block


def _one_layer_too_many() -> None:
    from firsttoken.progressive.distance import Distances

    right = Distances.block
    Distances.block = lambda self, size, tokens="last": right(self, size + 1, tokens)


MUTATIONS: list[Mutation] = [
    Mutation("11", "the deepest block is chosen", _deepest_block, "angular distance of a block", quick=True),
    Mutation("11", "the block that turns most is chosen", _most_turning_block, "angular distance of a block"),
    Mutation("11", "a distance over one layer too many", _one_layer_too_many, "angular distance of a block"),
]
