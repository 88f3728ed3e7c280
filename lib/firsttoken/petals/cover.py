"""Whether the parts of a way through a model are the whole of it: each of its layers, once, in order.

Every composition of a swarm is held against this: the route that is planned, the servers that a step or a pass is sent
to, those that it came through, and the layers that are lent to a start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from firsttoken.study.errors import SwarmError


def gaps(spans: Iterable[range], layers: range) -> list[range]:
    """The parts of ``layers`` that none of ``spans`` has, in order."""
    missing, at = [], layers.start
    for span in sorted(spans, key=lambda one: one.start):
        if at < min(span.start, layers.stop):
            missing.append(range(at, min(span.start, layers.stop)))
        at = max(at, span.stop)
    return [*missing, range(at, layers.stop)] if at < layers.stop else missing


def check_cover(spans: Iterable[range], layers: range) -> None:
    """Raise SwarmError unless ``spans``, in the order in which they come, have each of ``layers`` once and no other."""
    at, spans = layers.start, list(spans)
    for span in spans:
        if span.start != at or not len(span):
            break
        at = span.stop
    else:
        if at == layers.stop:
            return
    raise SwarmError(
        f"the servers have layers {named(spans)}, and the model needs {named([layers])}, each once and in order"
    )


def named(spans: Iterable[range]) -> str:
    """``spans`` as messages write them."""
    return ", ".join(f"[{span.start}, {span.stop})" for span in spans) or "none"


def unserved(blocks: Sequence[int]) -> str:
    """What a user is told of ``blocks`` that nobody serves."""
    return f"no server that answers has blocks {_spans(blocks)}: start one with `firsttoken swarm serve`"


def _spans(blocks: Sequence[int]) -> str:
    """``[2, 3, 4, 7]`` as "2 to 4, 7"."""
    spans: list[list[int]] = []
    for block in blocks:
        if spans and block == spans[-1][-1] + 1:
            spans[-1].append(block)
        else:
            spans.append([block])
    return ", ".join(f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
