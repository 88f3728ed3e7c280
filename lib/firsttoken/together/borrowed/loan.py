"""What a warm neighbour lends: steps through the layers that have not come, in one session for as long as that lasts.

The session is for all layers. Each step names the layer that it begins at, so that a layer that has come is left out
from then on, and the keys and values of those above it stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import torch
from torch import Tensor

from firsttoken.engine.edges import Edges
from firsttoken.study.errors import FirstTokenError, SwarmError
from firsttoken.swarm.access import Access
from firsttoken.swarm.background import begin, wait_for
from firsttoken.swarm.chain import messages_of
from firsttoken.swarm.line import Line, ServerFault
from firsttoken.swarm.patience import Patience
from firsttoken.swarm.wire import Stretch

HURRY_S = 0.5  # that an answer may still take when all layers have come


class NeighbourGone(SwarmError):
    """Nothing is lent any more, for the reason that it says."""


class Loan:
    """``depth`` layers of ``model`` (the neighbour's name of it) at ``address``; states are ``width`` wide.

    Opening it waits for nobody: a neighbour that cannot be reached is found out by the first step. Raises SwarmError
    for an address that may not be asked.
    """

    def __init__(
        self,
        address: str,
        model: str,
        depth: int,
        width: int,
        *,
        access: Access | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.address = address
        self.gone = ""  # why nothing is lent any more
        self._model, self._layers, self._width = model, range(depth), width
        self._access, self._patience = access or Access(), patience or Patience()
        self._lines: list[Line] = []
        wait_for(self._connect())

    @property
    def steps(self) -> int:
        """Messages that were answered."""
        return sum(line.steps for line in self._lines)

    @property
    def moved_bytes(self) -> int:
        """Of messages and answers so far."""
        return sum(line.moved_bytes for line in self._lines)

    def run(self, first: int, stretches: Sequence[Stretch], edges: Edges, over: Future[None]) -> Tensor:
        """The step of ``stretches`` through the layers from ``first`` on, which ``edges`` have what enters of.

        The states behind the last layer, [tokens, hidden]. Raises NeighbourGone when the neighbour does not answer in
        time or refuses, and soon when ``over``, where own layers can be waited for no longer.
        """
        if self.gone:
            raise NeighbourGone(self.gone)
        answer = begin(self._through(first, stretches, edges))
        wait([answer, over], return_when=FIRST_COMPLETED)
        try:
            return answer.result(None if answer.done() else HURRY_S)
        except TimeoutError:
            answer.cancel()
            why = f"{self.address} had not answered when all layers were here"
        except FirstTokenError as error:
            why = str(error)
        self.close(why)
        raise NeighbourGone(why)

    def forget(self, request: int) -> None:
        """The neighbour need not keep this one's keys and values."""
        if not self.gone:
            begin(self._lines[-1].forget([request]))

    def close(self, why: str = "all layers are here") -> None:
        """End the session; nothing is lent from now on."""
        if not self.gone:
            self.gone = why
            wait_for(self._end())

    async def _connect(self) -> None:
        self._channel = self._access.channel(self.address, self._width)
        self._open()

    def _open(self) -> None:
        coding = str(torch.float32).removeprefix("torch.")
        headers = self._access.headers
        self._lines.append(
            Line(self.address, self._channel, self._layers, self._model, coding, self._patience, headers)
        )

    async def _end(self) -> None:
        self._lines[-1].close()
        await self._channel.close()

    async def _through(self, first: int, stretches: Sequence[Stretch], edges: Edges) -> Tensor:
        try:
            return await self._send(first, stretches, edges)
        except ServerFault as fault:
            if fault.lasting:
                raise
        self._lines[-1].close()  # it has ended the session, of which it heard nothing for long: begin another
        self._open()
        return await self._send(first, stretches, edges)

    async def _send(self, first: int, stretches: Sequence[Stretch], edges: Edges) -> Tensor:
        """The step behind all of its sequences that the neighbour has not seen."""
        line = self._lines[-1]
        behind = [Stretch(one.number, min(line.known.get(one.number, 0), one.start), one.end) for one in stretches]
        parts: dict[int, list[Tensor]] = {one.number: [] for one in behind}
        for message in messages_of(behind):
            rows = torch.cat([edges.of(one.number, first)[0, one.start : one.end] for one in message]).cpu()
            said = await line.run(message, rows, first)
            for one, part in zip(message, said.split([one.end - one.start for one in message]), strict=True):
                parts[one.number].append(part)
        return torch.cat([torch.cat(parts[one.number])[one.start - one.end :] for one in stretches])
