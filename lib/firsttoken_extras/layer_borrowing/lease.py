"""Leases of layers: steps through the layers that have not come, in one session with each lender for as long as that
lasts.

A session is for all layers that the lender has. Each step names the layer that it begins at, so that a layer that has
come is left out from then on, and the keys and values of those above it stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import torch
from torch import Tensor

from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.petals.access import Access
from firsttoken.petals.chain import messages_of
from firsttoken.petals.event_loop import begin, wait_for
from firsttoken.petals.messages import SequenceChunk, split_rows
from firsttoken.petals.routing import check_cover
from firsttoken.petals.server_session import ServerFault, ServerSession
from firsttoken.petals.timeouts import Timeouts
from firsttoken.study.errors import FirstTokenError
from firsttoken_extras.layer_borrowing.lender import Lender, NeighbourGone, check_lenders

CODING = "float32"
"""What states travel in. Every dtype that is served fits into it, so none is rounded on its way: each token has to be
the one that the whole model says."""
HURRY_S = 0.5  # that an answer may still take when all layers have come


class BorrowedSpan:
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
        """Return the number of the request's tokens that the lender has seen."""
        return self.sessions[-1].known.get(request, 0)

    async def run(self, chunks: Sequence[SequenceChunk], hidden: Tensor, first: int) -> Tensor:
        """Run as ``ServerSession.run`` does, through its layers from ``first`` on. Where it has only lost its
        sequences, the ServerFault is not lasting, and a session is open that knows of none."""
        try:
            return await self.sessions[-1].run(chunks, hidden, max(first, self.layers.start))
        except ServerFault as fault:
            if not fault.lasting:
                self.sessions[-1].close()
                self._open()
            raise

    async def close(self) -> None:
        self.sessions[-1].close()
        await self._channel.close()

    def _open(self) -> None:
        patience = self._timeouts, self._access.headers
        session = ServerSession(self.address, self._channel, self.layers, self._model, CODING, *patience)
        self.sessions.append(session)


class Lease:
    """The layers of ``lenders``, one behind the other, up to the last of the ``depth`` of ``model`` (the lenders' name
    of it); states are ``width`` wide. Nobody lends those below ``first``.

    Opening it waits for nobody: a lender that cannot be reached is found out by the first step. When one of them is
    gone, all is. Raises SwarmError for lenders that leave a layer out or have one twice, and for an address that may
    not be asked.
    """

    def __init__(
        self,
        lenders: Sequence[Lender],
        model: str,
        depth: int,
        width: int,
        *,
        access: Access | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        check_lenders(lenders, depth)
        self.first = lenders[0].layers.start
        self.gone = ""  # why nothing is lent any more
        self._depth = depth
        self._spans: list[BorrowedSpan] = []
        self._last_lender = lenders[0].address  # who was asked last
        wait_for(self._connect(lenders, model, width, access or Access(), timeouts or Timeouts()))

    @property
    def steps(self) -> int:
        """Return the number of messages that were answered."""
        return sum(session.steps for span in self._spans for session in span.sessions)

    @property
    def moved_bytes(self) -> int:
        """The bytes of messages and answers so far."""
        return sum(session.moved_bytes for span in self._spans for session in span.sessions)

    def run(
        self, first: int, chunks: Sequence[SequenceChunk], hidden_cache: HiddenStateCache, returned: Future[None]
    ) -> Tensor:
        """Run the step of ``chunks`` through the layers from ``first`` on, which ``hidden_cache`` have what enters
        of.

        Return the states behind the last layer, [tokens, hidden]. Raises NeighbourGone when a lender does not answer in
        time or refuses, and soon once ``returned`` is done, as own layers can be waited for no longer.
        """
        if self.gone:
            raise NeighbourGone(self.gone)
        answer = begin(self._through(first, chunks, hidden_cache))
        wait([answer, returned], return_when=FIRST_COMPLETED)
        try:
            return answer.result(None if answer.done() else HURRY_S)
        except TimeoutError:
            answer.cancel()
            why = f"{self._last_lender} had not answered when all layers were here"
        except FirstTokenError as error:
            why = str(error)
        self.close(why)
        raise NeighbourGone(why)

    def forget(self, request: int) -> None:
        """Tell the lenders that none need keep the keys and values of ``request``."""
        for span in () if self.gone else self._spans:
            begin(span.sessions[-1].forget([request]))

    def close(self, why: str = "all layers are here") -> None:
        """End the sessions; nothing is lent from now on."""
        if not self.gone:
            self.gone = why
            wait_for(self._end())

    async def _connect(
        self, lenders: Sequence[Lender], model: str, width: int, access: Access, timeouts: Timeouts
    ) -> None:
        for lender in lenders:
            self._spans.append(BorrowedSpan(lender, model, width, access, timeouts))

    async def _end(self) -> None:
        for span in self._spans:
            await span.close()

    async def _through(self, first: int, chunks: Sequence[SequenceChunk], hidden_cache: HiddenStateCache) -> Tensor:
        for _ in self._spans:  # each may have lost its session, of which it heard nothing for long
            try:
                return await self._send(first, chunks, hidden_cache)
            except ServerFault as fault:
                if fault.lasting:
                    raise
        return await self._send(first, chunks, hidden_cache)

    async def _send(self, first: int, chunks: Sequence[SequenceChunk], hidden_cache: HiddenStateCache) -> Tensor:
        """Run the step from the first token of each sequence that one of the lenders in its way has not seen."""
        spans = [span for span in self._spans if first < span.layers.stop]
        entered = [range(max(first, span.layers.start), span.layers.stop) for span in spans]
        check_cover(entered, range(first, self._depth))
        behind = [
            SequenceChunk(chunk.number, min(chunk.start, *(span.known(chunk.number) for span in spans)), chunk.end)
            for chunk in chunks
        ]
        parts: dict[int, list[Tensor]] = {chunk.number: [] for chunk in behind}
        for message in messages_of(behind):
            states = torch.cat(
                [hidden_cache.of(chunk.number, first)[0, chunk.start : chunk.end] for chunk in message]
            ).cpu()
            for span in spans:
                self._last_lender = span.address
                states = await span.run(message, states, first)
            for chunk, part in zip(message, split_rows(states, message), strict=True):
                parts[chunk.number].append(part)
        return torch.cat([torch.cat(parts[chunk.number])[-chunk.tokens :] for chunk in chunks])
