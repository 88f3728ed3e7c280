"""A client's session with one server, for consecutive blocks, and whose fault it is where nothing is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from torch import Tensor

from firsttoken.petals.access import Channel
from firsttoken.petals.messages import HEADERS, SESSION, VERSION, SequenceChunk
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.wire import Message, decode, encode
from firsttoken.study.errors import SwarmError

REFUSALS = frozenset({"INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "OUT_OF_RANGE"})
"""The names of gRPC's codes by which a server says that what it was asked is wrong, whoever is asked."""


class ServerFault(SwarmError):
    """This server cannot go on with this; ``lasting`` unless it only has lost its sequences.

    One that has ``refused`` says that the client is wrong. Whether it is, only another server can tell.
    """

    def __init__(self, text: str, lasting: bool = True, refused: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting
        self.refused = refused


class UnverifiedFault(ServerFault):
    """This server is not to be believed: what it has answered so far may be wrong, too."""


class ServerSession:
    """``layers`` of ``model`` (sha256) on the server ``name`` that ``channel`` leads to, run on hidden states, which
    travel in ``coding``.

    ``known`` are the tokens of each sequence that the server has seen, ``commitment`` what it vouches for of its latest
    answer. To be made and used where gRPC's event loop runs.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        layers: range,
        model: str,
        coding: str,
        timeouts: Timeouts,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.name, self.layers, self._coding, self._timeouts = name, layers, coding, timeouts
        self.known: dict[int, int] = {}
        self._finished: set[int] = set()  # sequences that the server was not yet told to be over
        self.steps = 0  # that were answered
        self.moved_bytes = 0  # of messages, both ways
        self.answered_s = 0.0  # when it did so last, on the monotonic clock
        self.commitment = ""
        opened = zip(HEADERS, (VERSION, model, f"{layers.start}:{layers.stop}", coding), strict=True)
        self._call = channel.stream_stream(SESSION)(metadata=(*opened, *headers))
        self._turn = asyncio.Lock()

    async def run(self, chunks: Sequence[SequenceChunk], hidden: Tensor, first: int = 0) -> Tensor:
        """``hidden`` [tokens, hidden] of ``chunks``, end to end, after the layers, or after those from ``first`` on.

        Raises ServerFault when this server does not answer in time, or nonsense, or refuses.
        """
        answer = await self._answer(hidden, chunks, first)
        self.steps += 1
        for chunk in chunks:
            self.known[chunk.number] = chunk.end
        self.commitment = answer.commitment
        return answer.hidden

    async def forget(self, numbers: Sequence[int]) -> None:
        """Tell the server that these sequences are over; one that is not there any more knows anyway."""
        self._finished.update(number for number in numbers if self.known.pop(number, None) is not None)
        if not (finished := list(self._finished)):
            return
        if await self._write(encode(None, self._coding, finished=finished)):
            self._finished.difference_update(finished)  # else the next step tells it, or finds out

    def close(self) -> None:
        self._call.cancel()

    async def _answer(self, hidden: Tensor, chunks: Sequence[SequenceChunk], first: int) -> Message:
        """Return the server's answer to ``hidden`` [tokens, hidden]. Raises as ``run``."""
        rows, finished = hidden.shape[0], list(self._finished)
        message = encode(hidden, self._coding, chunks, finished, first)
        limit_s = self._timeouts.limit_s(rows)
        try:
            async with asyncio.timeout(limit_s):
                data = await self._exchange(message)
        except TimeoutError:
            raise ServerFault(f"{self.name} did not answer within {limit_s:.1f} s") from None
        self.moved_bytes += len(message) + len(data)
        self._finished.difference_update(finished)
        try:
            answer = decode(data, self._coding, hidden.shape[1], hidden.dtype, rows)
        except Exception as error:  # whatever goes wrong with its answer is this server's fault
            raise ServerFault(f"{self.name}: {error}") from error
        self.answered_s = time.monotonic()
        return answer

    async def _write(self, message: bytes) -> bool:
        """Send ``message``, which has no answer; return whether that was possible."""
        import grpc

        try:
            async with asyncio.timeout(self._timeouts.answer_s), self._turn:
                await self._call.write(message)
            return True
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError):
            return False
        except asyncio.CancelledError:  # of the call, as the session was ended meanwhile, or of whoever asks
            if asyncio.current_task().cancelling():
                raise
            return False

    async def _exchange(self, message: bytes) -> bytes:
        import grpc

        try:
            # The lock is not held while the answer is awaited: ``_write`` writes, too, and must not wait for a step.
            async with self._turn:
                await self._call.write(message)
            data = await self._call.read()
            if data is not grpc.aio.EOF:
                return data
            code, details = await self._call.code(), await self._call.details()
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
        except grpc.aio.BaseError as error:
            raise ServerFault(f"{self.name}: its connection was closed ({error})", lasting=False) from None
        except asyncio.InvalidStateError:  # the call is over, and its status says why
            code, details = await self._call.code(), await self._call.details()
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise ServerFault(f"{self.name}: its connection was closed", lasting=False) from None
        if code.name in REFUSALS:
            raise ServerFault(f"{self.name} refuses: {details or code.name}", refused=True)
        details = "it ended the session without a word" if code is grpc.StatusCode.OK else details or code.name
        # a session that was never answered has nothing that could be lost
        raise ServerFault(f"{self.name}: {details}", lasting=code is not grpc.StatusCode.ABORTED or not self.steps)
