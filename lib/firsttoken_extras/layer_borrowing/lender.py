"""Servers that lend layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from firsttoken.petals.routing import check_cover, span_names
from firsttoken.study.errors import SwarmError


class NeighbourGone(SwarmError):
    """Raised where nothing is lent any more, with the reason."""


class Lender(NamedTuple):
    """A server at ``address`` (HOST:PORT), which lends these ``layers``."""

    address: str
    layers: range


def check_lenders(lenders: Sequence[Lender], depth: int) -> None:
    """Raise SwarmError unless ``lenders``, in order, have each layer from their first one to ``depth`` - 1 once."""
    spans = [lender.layers for lender in lenders]
    try:
        check_cover(spans, range(spans[0].start if spans else 0, depth))
    except SwarmError:
        order = f"name them in order up to the end of [0, {depth}), each layer once"
        raise SwarmError(f"lenders have layers {span_names(spans)}; {order}") from None
