"""Servers that lend layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from firsttoken.petals.routing import check_cover, named
from firsttoken.study.errors import SwarmError


class NeighbourGone(SwarmError):
    """Nothing is lent any more, for the reason that it says."""


class Lender(NamedTuple):
    """A server at ``address`` (HOST:PORT), which lends these ``layers``."""

    address: str
    layers: range


def check_lenders(lenders: Sequence[Lender], depth: int) -> None:
    """Raise SwarmError unless ``lenders``, in order, have each layer from their first one to ``depth`` - 1 once."""
    spans = [one.layers for one in lenders]
    try:
        check_cover(spans, range(spans[0].start if spans else 0, depth))
    except SwarmError:
        told = f"lenders have layers {named(spans)}; name them in order up to the end of [0, {depth}), each layer once"
        raise SwarmError(told) from None
