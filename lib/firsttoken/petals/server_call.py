"""A client's stream to one server, as bytes: what is asked and answered, and whose fault it is where nothing is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from firsttoken.petals.access import Channel
from firsttoken.petals.message_headers import HEADERS, SESSION, VERSION
from firsttoken.petals.timeouts import Timeouts
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


class ServerCall:
    """A session for ``layers`` of ``model`` (sha256), whose hidden states travel in ``coding``, on the server that
    ``name`` tells and ``channel`` leads to.

    To be made and used where gRPC's event loop runs.
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
        self.name, self.layers, self.coding, self.timeouts = name, layers, coding, timeouts
        self.known: dict[int, int] = {}  # the tokens of each sequence that the server has seen
        self.steps = 0  # that were answered
        self.moved_bytes = 0  # of messages, both ways
        opened = zip(HEADERS, (VERSION, model, f"{layers.start}:{layers.stop}", coding), strict=True)
        self._call = channel.stream_stream(SESSION)(metadata=(*opened, *headers))
        self._turn = asyncio.Lock()

    async def ask(self, message: bytes, tokens: int) -> bytes:
        """The answer to ``message``, a step of so many tokens. Raises ServerFault when there is none in time, or the
        server refuses."""
        limit_s = self.timeouts.limit_s(tokens)
        try:
            async with asyncio.timeout(limit_s):
                data = await self._exchange(message)
        except TimeoutError:
            raise ServerFault(f"{self.name} did not answer within {limit_s:.1f} s") from None
        self.moved_bytes += len(message) + len(data)
        return data

    async def tell(self, message: bytes) -> bool:
        """Send ``message``, which has no answer; return whether that was possible."""
        import grpc

        try:
            async with asyncio.timeout(self.timeouts.answer_s), self._turn:
                await self._call.write(message)
            return True
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError):
            return False
        except asyncio.CancelledError:  # of the call, as the session was ended meanwhile, or of whoever asks
            if asyncio.current_task().cancelling():
                raise
            return False

    def close(self) -> None:
        self._call.cancel()

    async def _exchange(self, message: bytes) -> bytes:
        import grpc

        try:
            # The lock is not held while the answer is awaited: ``tell`` writes, too, and must not wait for a step.
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
