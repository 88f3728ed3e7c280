"""A client's session with one server, for consecutive blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from firsttoken.study.errors import RequestError, SwarmError
from firsttoken.swarm.patience import Patience
from firsttoken.swarm.service import SESSION
from firsttoken.swarm.session import HEADERS
from firsttoken.swarm.wire import VERSION, Stretch, decode, encode

if TYPE_CHECKING:
    import grpc


class ServerFault(SwarmError):
    """This server cannot go on with this; ``lasting`` unless it only has lost its sequences."""

    def __init__(self, text: str, lasting: bool = True) -> None:
        super().__init__(text)
        self.lasting = lasting


class Line:
    """``layers`` of ``model`` (sha256) on the server that ``name`` tells and ``channel`` leads to.

    Hidden states travel in ``coding``. ``known`` are the tokens of each sequence that the server has seen,
    ``commitment`` what it vouches for of its latest answer.
    """

    def __init__(
        self,
        name: str,
        channel: grpc.aio.Channel,
        layers: range,
        model: str,
        coding: str,
        patience: Patience,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.name = name
        self.layers = layers
        self.known: dict[int, int] = {}
        self.steps = 0
        self.commitment = ""
        self.moved_bytes = 0  # of messages, both ways
        self._coding, self._patience = coding, patience
        opened = zip(HEADERS, (VERSION, model, f"{layers.start}:{layers.stop}", coding), strict=True)
        self._call = channel.stream_stream(SESSION)(metadata=(*opened, *headers))
        self._turn = asyncio.Lock()

    async def run(self, stretches: Sequence[Stretch], hidden: Tensor, first: int = 0) -> Tensor:
        """``hidden`` [tokens, hidden] of ``stretches``, end to end, after the layers, or after those from ``first`` on.

        Raises ServerFault when this server does not answer in time, or nonsense, RequestError for what every server
        refuses.
        """
        rows, dtype = hidden.shape[0], hidden.dtype
        limit_s = self._patience.limit_s(rows)
        try:
            async with asyncio.timeout(limit_s):
                message = encode(hidden, self._coding, stretches, first=first)
                data = await self._exchange(message)
            self.moved_bytes += len(message) + len(data)
            answer = decode(data, self._coding, hidden.shape[1], dtype, rows)
        except TimeoutError:
            raise ServerFault(f"{self.name} did not answer within {limit_s:.1f} s") from None
        except ServerFault:
            raise
        except SwarmError as error:
            raise ServerFault(f"{self.name}: {error}") from error
        self.steps += 1
        for one in stretches:
            self.known[one.number] = one.end
        self.commitment = answer.commitment
        return answer.hidden

    async def forget(self, numbers: Sequence[int]) -> None:
        """Tell the server that these sequences are over; one that is not there any more knows anyway."""
        import grpc

        over = [number for number in numbers if self.known.pop(number, None) is not None]
        if not over:
            return
        try:
            async with asyncio.timeout(self._patience.answer_s), self._turn:
                await self._call.write(encode(None, self._coding, over=over))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            pass  # the next step finds out

    def close(self) -> None:
        """End the session."""
        self._call.cancel()

    async def _exchange(self, message: bytes) -> bytes:
        import grpc

        try:
            async with self._turn:
                await self._call.write(message)
            data = await self._call.read()
            if data is not grpc.aio.EOF:
                return data
            code, said = await self._call.code(), await self._call.details()
        except grpc.aio.AioRpcError as error:
            code, said = error.code(), error.details()
        except asyncio.InvalidStateError:  # the call is over, and its status says why
            code, said = await self._call.code(), await self._call.details()
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise ServerFault(f"{self.name}: its connection was closed", lasting=False) from None
        codes = grpc.StatusCode
        if code in (codes.INVALID_ARGUMENT, codes.UNAUTHENTICATED):
            raise RequestError(f"{self.name} refuses: {said}")
        raise ServerFault(f"{self.name}: {said or code.name}", lasting=code is not codes.ABORTED)
