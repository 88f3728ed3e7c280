"""Servers that lend layers, and how a session with one is opened: without torch, which may not be there yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from firsttoken.petals.access import Access, Channel
from firsttoken.petals.routing import check_cover, named
from firsttoken.petals.server_call import ServerCall
from firsttoken.petals.timeouts import Timeouts
from firsttoken.study.errors import SwarmError

CODING = "float32"
"""What states travel in. Every dtype that is served fits into it, so none is rounded on its way: each token has to be
the one that the whole model says."""


class NeighbourGone(SwarmError):
    """Nothing is lent any more, for the reason that it says."""


class Lender(NamedTuple):
    """A server at ``address`` (HOST:PORT), which lends these ``layers``."""

    address: str
    layers: range


class OpenSession(NamedTuple):
    """A session with a lender: its ``channel``, and the ``call`` over it."""

    channel: Channel
    call: ServerCall


@dataclass(frozen=True)
class Lending:
    """What ``lender`` is asked for: its layers of ``model`` (its name of it), whose states are ``width`` wide."""

    lender: Lender
    model: str
    width: int
    access: Access = field(default_factory=Access)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def open(self, channel: Channel | None = None) -> OpenSession:
        """A session, over ``channel`` where there is one; to be called where gRPC's event loop runs.

        It waits for nobody. Raises SwarmError for an address that may not be asked.
        """
        address, layers = self.lender
        channel = channel or self.access.channel(address, self.width)
        told = self.model, CODING, self.timeouts, self.access.headers
        return OpenSession(channel, ServerCall(address, channel, layers, *told))


def check_lenders(lenders: Sequence[Lender], depth: int) -> None:
    """Raise SwarmError unless ``lenders``, in order, have each layer from their first one to ``depth`` - 1 once."""
    spans = [one.layers for one in lenders]
    try:
        check_cover(spans, range(spans[0].start if spans else 0, depth))
    except SwarmError:
        told = f"lenders have layers {named(spans)}; name them in order up to the end of [0, {depth}), each layer once"
        raise SwarmError(told) from None
