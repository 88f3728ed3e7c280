"""A server of a swarm: its blocks loaded, served and announced, for the time of a block or until it is told to end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from firsttoken.petals.access import Access, server_options
from firsttoken.petals.addresses import source_of
from firsttoken.petals.announcer import Announcer
from firsttoken.petals.batcher import Batcher
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.contacts import ASKED_BYTES, TALK, Contacts, decode_exchange
from firsttoken.petals.fairness import client_of
from firsttoken.petals.keys import public_hex, server_key
from firsttoken.petals.kv_slots import KVSlots, MissingTokensError
from firsttoken.petals.messages import SERVICE
from firsttoken.petals.placement import Rebalancing
from firsttoken.petals.records import Record, Registry, TwinError, steady_s
from firsttoken.petals.session import IdleClientError, ServerLimits, Sessions
from firsttoken.petals.trust.arbitration import Arbitrator
from firsttoken.petals.trust.commitments import Committer, read_evidence
from firsttoken.petals.tuning.frozen import FrozenBlocks
from firsttoken.study.errors import BusyError, FirstTokenError, RequestError, SwarmError
from firsttoken.study.system.openmp import loops_elsewhere

if TYPE_CHECKING:
    import grpc

# The calls of a server over gRPC, bytes in and out: a session of steps, a pass of training, an exchange of records, and
# a charge against another server.


@dataclass(eq=False)
class BlockService:
    """``sessions``, passes through ``frozen`` (None: this server does not train) and what its ``contacts`` know, served
    to whom their access admits; ``arbitrator`` judges other servers. The ``announcer`` is given when the port is known:
    it speaks for this server."""

    sessions: Sessions
    contacts: Contacts
    arbitrator: Arbitrator
    frozen: FrozenBlocks | None
    announcer: Announcer = field(init=False)

    async def start(self, host: str, port: int) -> tuple[grpc.aio.Server, int]:
        """Listen; the server and its port. Raises SwarmError as ``Access.listen``."""
        import grpc

        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Exchange": grpc.unary_unary_rpc_method_handler(self._exchange),
            "Pass": grpc.stream_unary_rpc_method_handler(self._pass),
            "Accuse": grpc.stream_unary_rpc_method_handler(self._accuse),
        }
        backend = self.sessions.batcher.backend
        trained = len(backend.blocks) if self.frozen else 0
        server = grpc.aio.server(options=server_options(backend.width, trained))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        bound = self.contacts.access.listen(server, host, port)
        await server.start()
        return server, bound

    async def _session(self, _: object, context: grpc.aio.ServicerContext) -> None:
        headers = await self._admitted(context)
        async with _reporting_errors(context):
            await self.sessions.serve(context, headers)

    async def _pass(self, _: object, context: grpc.aio.ServicerContext) -> bytes:
        """One message, taken from the client when there is a place for it: gRPC alone would take any number."""
        import grpc

        async def said() -> bytes:
            if (data := await self.sessions.within_limit(context.read(), "said nothing")) is grpc.aio.EOF:
                raise RequestError("a pass came without a message")
            return data

        headers = await self._admitted(context)
        async with _reporting_errors(context):
            layers, *_ = self.sessions.parse_headers(headers)
            client = client_of(context.peer())
            self.sessions.free_place(client)
            if self.frozen is None:
                raise SwarmError("this server does not train: start one with --train")
            return await self.frozen.answer(said, layers, self.sessions.batcher.backend.width, client)

    async def _exchange(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await self._admitted(context)
        if len(data) > ASKED_BYTES:
            refusal = f"a member says one record of itself, in {ASKED_BYTES} bytes at most: {len(data)} are not read"
            await _abort(context, RequestError(refusal))
        refused = ""
        try:
            exchanged = decode_exchange(data)
            if exchanged.talk != TALK:
                refused = f"this member speaks version {TALK} of records, not {exchanged.talk}: have one version on all"
            elif (record := exchanged.speaker) is not None:
                refused = await self.contacts.receive(record, source_of(context.peer()))
        except TwinError as error:
            await _abort(context, error)
        except SwarmError as error:
            await _abort(context, RequestError(str(error)))
        return self.announcer.answer(exchanged, refused)

    async def _accuse(self, messages: AsyncIterable[bytes], context: grpc.aio.ServicerContext) -> bytes:
        await self._admitted(context)
        backend = self.sessions.batcher.backend
        async with _reporting_errors(context), self.arbitrator.case():
            reading = read_evidence(messages, backend.width, backend.context)
            evidence = await self.sessions.within_limit(reading, "did not bring its evidence")
            return json.dumps(asdict(await self.arbitrator.judge(evidence, source_of(context.peer())))).encode()

    async def _admitted(self, context: grpc.aio.ServicerContext) -> dict[str, str]:
        import grpc

        headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        if not self.contacts.access.admits(headers):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this swarm asks for a token: give --token-file")
        return headers


@asynccontextmanager
async def _reporting_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """End the call with any error of the block; a cancellation, which says that the client has gone, passes through."""
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
        ((MissingTokensError, IdleClientError), code.ABORTED),
        (RequestError, code.INVALID_ARGUMENT),
        (SwarmError, code.FAILED_PRECONDITION),
    ]
    status = next((code for kind, code in kinds if isinstance(error, kind)), code.INTERNAL)
    details = str(error) if isinstance(error, FirstTokenError) else f"the blocks failed: {error}"
    await context.abort(status, " ".join(details.split())[:500])


# A server that goes where the swarm gains by it, while it serves (PETALS, section 3.2).
#
# Turns are taken by records alone. Who means to move says so, exchanges with every member, and goes only if the move is
# still wanted with all counted who said so earlier. Of two that reach each other one hears of the other so, in whatever
# order their messages come: who was asked before it had decided knows the other's wish when it does, and who was asked
# later answers that it has gone.


def move_target(
    rule: Rebalancing, own_record: Record, others: Iterable[Record], depth: int, answered: Collection[str] | None = None
) -> range | None:
    """The blocks of ``depth`` that the server of ``own_record`` should hold instead by ``rule``, or None where it
    stays.

    One that has said what it wishes counts those ``others`` as gone who said so before. Unless some block is unserved
    that nobody loads, it leaves none that is not served by somebody who stays, and is among those who ``answered``
    (None: all of them).
    """
    turn = own_record.turn if own_record.wishes else None
    others = [record for record in others if record.server != own_record.server and record.model == own_record.model]
    # anybody may announce anything
    others = [record for record in others if max(record.blocks[1], record.target[1]) <= depth]
    placed = [record.reachable(0.0, span) for record in others if (span := record.counted(turn))]
    target = rule.move(own_record.server, [*placed, own_record.reachable(0.0)], depth)
    if target is None:
        return None
    present = [own_record.span, *(record.span or record.counted() for record in others)]  # a wish may yet be taken back
    if len({block for span in present for block in span}) < depth:
        return target  # nobody gets through as it is
    staying = [
        record
        for record in others
        if (answered is None or record.server in answered) and record.counted(turn) == record.span
    ]
    return target if set(own_record.span) <= {block for record in staying for block in record.span} else None


class Rebalancer:
    """Moves the server whose calls ``service`` answers, by ``rule``; ``on_move`` is given its record after."""

    def __init__(self, rule: Rebalancing, service: BlockService, on_move: Callable[[Record], None]) -> None:
        self._rule, self._on_move = rule, on_move
        self._announcer, self._registry = service.announcer, service.contacts.registry
        self._sessions, self._frozen, self._limits = service.sessions, service.frozen, service.sessions.limits

    async def run(self) -> None:
        """Look once a period, until cancelled. Raises ModelError for blocks that cannot be loaded."""
        await asyncio.sleep(self._limits.rebalance_s * random.random())  # not all at once
        while True:
            await self.rebalance()
            await asyncio.sleep(self._limits.rebalance_s)

    async def rebalance(self) -> bool:
        """Move if the swarm gains enough by it, and return whether it moved. Raises as ``run``."""
        target = self._move_target()
        while target is not None:
            self._announcer.update(target=(target.start, target.stop), wishes=steady_s())
            answered = await self._announcer.exchange_with_all()
            again = self._move_target(answered)
            if again == target:  # no await until the record says so: who asks hears of a wish, or of a move
                self._announcer.update(blocks=(0, 0), wishes=0.0)
                await self._move(target)
                return True
            self._announcer.update(target=(0, 0), wishes=0.0)  # somebody who was earlier goes there
            target = again
        return False

    def _move_target(self, answered: Collection[str] | None = None) -> range | None:
        records, depth = self._registry.live(steady_s()), self._sessions.batcher.backend.depth
        return move_target(self._rule, self._announcer.record, records, depth, answered)

    async def _move(self, blocks: range) -> None:
        backend = self._sessions.batcher.backend
        await asyncio.gather(self._announcer.exchange_with_all(), self._sessions.drain(self._limits.drain_s))
        await self._sessions.batcher.run_between(lambda: backend.move(blocks))
        throughput = await self._sessions.batcher.run_between(backend.measured_throughput)
        if self._frozen is not None:
            await self._frozen.move(blocks)
        # Sessions are taken again before the record names the new blocks: who reads it may open one at once.
        self._sessions.moving = False
        self._on_move(self._announcer.update(blocks=(blocks.start, blocks.stop), target=(0, 0), throughput=throughput))
        await self._announcer.exchange_with_all()


_ANNOUNCED_S = 1.0
_GRACE_S = 0.5  # for the steps that are under way when a server is told to end


@dataclass(frozen=True)
class ServerConfig:
    """``blocks`` of the model in ``folder``, computed in ``dtype``, served on ``host`` and ``port`` (0: a free one).

    ``address`` is what others are told (HOST:PORT; by default where it listens), ``peers`` are members to begin with,
    ``key`` the file of its key (None: a new one). One that ``trains`` answers passes of training, too; with a rule of
    ``rebalancing`` it takes other blocks where the swarm gains by it.
    """

    folder: Path
    blocks: range
    dtype: torch.dtype
    host: str = "127.0.0.1"
    port: int = 0
    address: str = ""
    peers: Sequence[str] = ()
    key: Path | None = None
    access: Access = field(default_factory=Access)
    limits: ServerLimits = field(default_factory=ServerLimits)
    trains: bool = False
    rebalancing: Rebalancing | None = None


@dataclass(frozen=True)
class RunningServer:
    """A server that is up: who speaks for it, the ``port`` that it listens on, its ``sessions``, what it knows of
    others, its ``frozen`` blocks where it trains, and who moves it if it may; ``failed`` is done when it cannot go
    on."""

    announcer: Announcer
    port: int
    sessions: Sessions
    registry: Registry
    failed: asyncio.Future
    frozen: FrozenBlocks | None = None
    rebalancer: Rebalancer | None = None

    @property
    def record(self) -> Record:
        """Return the record that the server announces now."""
        return self.announcer.record


@asynccontextmanager
async def serving(
    config: ServerConfig,
    model: str,
    make_backend: Callable[..., BlockBackend] = BlockBackend,
    on_served: Callable[[Record, int], None] = lambda *_: None,
) -> AsyncIterator[RunningServer]:
    """The server of blocks of ``model`` (its sha256), up and announced for the time of the block.

    ``make_backend`` makes its blocks: those that compute wrongly have a class of their own. ``on_served`` is given its
    record and the port that it listens on when it serves, and again whenever it has moved.

    Raises ModelError for blocks that cannot be loaded, SwarmError for an address that cannot be had or may not.
    """
    # One thread loads, computes and moves the blocks, so that no two of these meet, and the event loop, which may not
    # wait, stays free for messages.
    computing = ThreadPoolExecutor(1, thread_name_prefix="firsttoken-blocks")
    make = partial(make_backend, config.folder, config.blocks, config.dtype, config.limits.kv_tokens)
    backend = await asyncio.get_running_loop().run_in_executor(computing, make)
    key, registry = server_key(config.key), Registry()
    limits, pool = config.limits, backend.pool
    slots = KVSlots(pool.blocks, pool.shape.block_tokens, limits.sequences, backend.context, limits.spare_s)
    batcher = Batcher(backend, slots, limits.batch_tokens, computing)
    sessions = Sessions(batcher, model, limits, Committer(key, model))
    arbitrator = Arbitrator(config.folder, model, registry)
    frozen = None
    if config.trains:
        frozen = await batcher.run_between(partial(FrozenBlocks, config.folder, config.blocks, config.dtype))
    contacts = Contacts(registry, config.access, backend.width)
    service = BlockService(sessions, contacts, arbitrator, frozen)
    throughput = await batcher.run_between(backend.measured_throughput)
    server, port = await service.start(config.host, config.port)
    now = steady_s()
    record = Record(
        public_hex(key),
        config.address or (f"[{config.host}]:{port}" if ":" in config.host else f"{config.host}:{port}"),
        (config.blocks.start, config.blocks.stop),
        model,
        throughput,
        started=now,
        issued=now,
        expires=now + limits.expiry_s,
        moves=config.rebalancing is not None,
        adapters=backend.adapters,
    )
    announcer = Announcer(record, key, contacts, config.peers, limits.expiry_s)
    service.announcer = announcer
    rebalancer = None
    if config.rebalancing is not None:
        rebalancer = Rebalancer(config.rebalancing, service, lambda record: on_served(record, port))
    tasks = [asyncio.create_task(batcher.serve()), asyncio.create_task(announcer.run())]
    tasks += [asyncio.create_task(rebalancer.run())] if rebalancer is not None else []
    failed = asyncio.gather(*tasks)
    try:
        with suppress(TimeoutError):  # the others are told for the first time, if they answer
            async with asyncio.timeout(_ANNOUNCED_S):
                await announcer.announced.wait()
        on_served(record, port)
        # On the batcher's thread, which has loaded, too: threads of this one would be in its way.
        with loops_elsewhere():
            yield RunningServer(announcer, port, sessions, registry, failed, frozen, rebalancer)
        for task in tasks[1:]:
            task.cancel()
        with suppress(SwarmError):
            await announcer.leave()
    finally:
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        await server.stop(_GRACE_S)
        tasks[0].cancel()  # the batcher, when steps have had their time
        await asyncio.gather(tasks[0], failed, return_exceptions=True)
        batcher.close()
        arbitrator.close()
        if frozen is not None:
            frozen.close()
