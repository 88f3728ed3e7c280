"""The calls of a server over gRPC, bytes in and out: a session of steps, a pass of training, an exchange of records, a
charge against another server, and what is said to one's account."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from firsttoken.petals.access import Access, server_options
from firsttoken.petals.addresses import source_of
from firsttoken.petals.announcer import Announcer
from firsttoken.petals.contacts import Contacts
from firsttoken.petals.fairness import client_of
from firsttoken.petals.kv_slots import LostError
from firsttoken.petals.messages import ASKED_BYTES, TALK, hear
from firsttoken.petals.records import TwinError
from firsttoken.petals.session import IdleError, Sessions
from firsttoken.petals.trust.arbitration import Arbitrator
from firsttoken.petals.trust.commitments import read_evidence
from firsttoken.petals.tuning.frozen import FrozenBlocks
from firsttoken.petals.wire import SERVICE
from firsttoken.study.errors import BusyError, FirstTokenError, RequestError, SwarmError

if TYPE_CHECKING:
    import grpc


class BlockService:
    """``sessions``, passes through ``frozen`` (None: this server does not train) and what its ``contacts`` know, served
    to whom ``access`` admits; ``arbitrator`` judges other servers, and keeps the accounts under this one's subkey. The
    ``announcer`` is given when the port is known: it speaks for this server."""

    announcer: Announcer

    def __init__(
        self,
        sessions: Sessions,
        contacts: Contacts,
        arbitrator: Arbitrator,
        access: Access,
        frozen: FrozenBlocks | None = None,
    ) -> None:
        self.sessions = sessions
        self.contacts = contacts
        self.arbitrator = arbitrator
        self.access = access
        self.frozen = frozen

    async def start(self, host: str, port: int) -> tuple[grpc.aio.Server, int]:
        """Listen; the server and its port. Raises SwarmError as ``Access.listen``."""
        import grpc

        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Exchange": grpc.unary_unary_rpc_method_handler(self._exchange),
            "Pass": grpc.stream_unary_rpc_method_handler(self._pass),
            "Accuse": grpc.stream_unary_rpc_method_handler(self._accuse),
            "Account": grpc.unary_unary_rpc_method_handler(self._account),
        }
        backend = self.sessions.batcher.backend
        trained = len(backend.blocks) if self.frozen else 0
        server = grpc.aio.server(options=server_options(backend.width, trained))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        bound = self.access.listen(server, host, port)
        await server.start()
        return server, bound

    async def _session(self, _: object, context: grpc.aio.ServicerContext) -> None:
        headers = await self._admitted(context)
        async with _told(context):
            await self.sessions.serve(context, headers)

    async def _pass(self, _: object, context: grpc.aio.ServicerContext) -> bytes:
        """One message, taken from the client when there is a place for it: gRPC alone would take any number."""
        import grpc

        async def said() -> bytes:
            if (data := await self.sessions.within(context.read(), "said nothing")) is grpc.aio.EOF:
                raise RequestError("a pass came without a message")
            return data

        headers = await self._admitted(context)
        async with _told(context):
            layers, _ = self.sessions.opened(headers)
            client = client_of(context.peer())
            self.sessions.make_way(client)
            self.sessions.queue.check_free(self.sessions.spare())
            if self.frozen is None:
                raise SwarmError("this server does not train: start one with --train")
            return await self.frozen.answer(said, layers, self.sessions.batcher.backend.width, client)

    async def _exchange(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await self._admitted(context)
        if len(data) > ASKED_BYTES:
            said = f"a member says one record of itself, in {ASKED_BYTES} bytes at most: {len(data)} are not read"
            await _abort(context, RequestError(said))
        refused = ""
        try:
            told = hear(data)
            if told.talk != TALK:
                refused = f"this member speaks version {TALK} of records, not {told.talk}: have one version on all"
            for own in [] if refused else [one for one in told.records if one.server == told.server][:1]:
                refused = await self.contacts.hear_of(own, source_of(context.peer()))
        except TwinError as error:
            await _abort(context, error)
        except SwarmError as error:
            await _abort(context, RequestError(str(error)))
        return self.announcer.answer(told, refused)

    async def _accuse(self, messages: AsyncIterable[bytes], context: grpc.aio.ServicerContext) -> bytes:
        await self._admitted(context)
        backend = self.sessions.batcher.backend
        async with _told(context), self.arbitrator.case():
            reading = read_evidence(messages, backend.width, backend.context)
            evidence = await self.sessions.within(reading, "did not bring its evidence")
            return json.dumps(asdict(await self.arbitrator.judge(evidence, source_of(context.peer())))).encode()

    async def _account(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await self._admitted(context)
        try:
            if len(data) > ASKED_BYTES:
                raise SwarmError(
                    f"an account is told one thing, in {ASKED_BYTES} bytes at most: {len(data)} are not read"
                )
            return json.dumps(asdict(self.arbitrator.ledger.told(data))).encode()
        except SwarmError as error:
            await _abort(context, RequestError(str(error)))

    async def _admitted(self, context: grpc.aio.ServicerContext) -> dict[str, str]:
        import grpc

        headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        if not self.access.admits(headers):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this swarm asks for a token: give --token-file")
        return headers


@asynccontextmanager
async def _told(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """What goes wrong in the block ends the call; that the client has gone, a cancellation, passes through."""
    try:
        yield
    except Exception as error:
        await _abort(context, error)


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> None:
    """End a call with one line that says why; its code tells a client whether another server would say otherwise."""
    import grpc

    code = grpc.StatusCode
    kinds = [
        (TwinError, code.ALREADY_EXISTS),
        (BusyError, code.RESOURCE_EXHAUSTED),
        ((LostError, IdleError), code.ABORTED),
        (RequestError, code.INVALID_ARGUMENT),
        (SwarmError, code.FAILED_PRECONDITION),
    ]
    found = next((code for kind, code in kinds if isinstance(error, kind)), code.INTERNAL)
    said = str(error) if isinstance(error, FirstTokenError) else f"the blocks failed: {error}"
    await context.abort(found, " ".join(said.split())[:500])
