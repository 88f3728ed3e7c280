"""A server that lends layers, and the session with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from firsttoken.petals.access import Access
from firsttoken.petals.routing import check_cover, named
from firsttoken.petals.server_session import ServerFault, ServerSession
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.wire import Stretch
from firsttoken.study.errors import SwarmError


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


class LentSpan:
    """The layers of ``lender``, for as long as it goes on: one session after another, as it may lose one without fault.

    To be made and used where gRPC's event loop runs. Raises SwarmError for an address that may not be asked.
    """

    def __init__(self, lender: Lender, model: str, width: int, access: Access, timeouts: Timeouts) -> None:
        self.address, self.layers = lender
        self.sessions: list[ServerSession] = []  # the last one is open
        self._model, self._access, self._timeouts = model, access, timeouts
        self._channel = access.channel(self.address, width)
        self._open()

    def known(self, request: int) -> int:
        """Tokens of the request that it has seen."""
        return self.sessions[-1].known.get(request, 0)

    async def run(self, stretches: Sequence[Stretch], hidden: Tensor, first: int) -> Tensor:
        """Run as ``ServerSession.run`` does, through its layers from ``first`` on. Where it has only lost its
        sequences, the ServerFault is not lasting, and a session is open that knows of none."""
        try:
            return await self.sessions[-1].run(stretches, hidden, max(first, self.layers.start))
        except ServerFault as fault:
            if not fault.lasting:
                self.sessions[-1].close()
                self._open()
            raise

    async def close(self) -> None:
        """End the session."""
        self.sessions[-1].close()
        await self._channel.close()

    def _open(self) -> None:
        # Every dtype that is served fits into float32, so no state is rounded on its way: each token has to be the one
        # that the whole model says.
        coding = str(torch.float32).removeprefix("torch.")
        session = ServerSession(
            self.address, self._channel, self.layers, self._model, coding, self._timeouts, self._access.headers
        )
        self.sessions.append(session)
