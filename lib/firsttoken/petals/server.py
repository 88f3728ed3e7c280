"""A server of a swarm: its blocks loaded, served and announced, for the time of a block or until it is told to end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from firsttoken.petals.access import Access
from firsttoken.petals.announcer import Announcer
from firsttoken.petals.batcher import Batcher
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.contacts import Contacts
from firsttoken.petals.keys import public_hex, server_key
from firsttoken.petals.kv_slots import KVSlots
from firsttoken.petals.placement import Rebalancing
from firsttoken.petals.records import Record, Registry
from firsttoken.petals.service import BlockService
from firsttoken.petals.session import ServerLimits, Sessions
from firsttoken.petals.trust.arbitration import Arbitrator
from firsttoken.petals.trust.commitments import Committer
from firsttoken.petals.trust.ledger import Ledger
from firsttoken.petals.trust.priority_queue import PriorityQueue
from firsttoken.petals.tuning.frozen import FrozenBlocks
from firsttoken.study.errors import SwarmError
from firsttoken.study.system.openmp import loops_elsewhere

# A server that goes where the swarm gains by it, while it serves (PETALS, section 3.2).
#
# Turns are taken by records alone. Who means to move says so, exchanges with every member, and goes only if the move is
# still wanted with all counted who said so earlier. Of two that reach each other one hears of the other so, in whatever
# order their messages come: who was asked before it had decided knows the other's wish when it does, and who was asked
# later answers that it has gone.


def wanted(
    rule: Rebalancing, mine: Record, others: Iterable[Record], depth: int, answered: Collection[str] | None = None
) -> range | None:
    """The blocks of ``depth`` that the server of ``mine`` should hold instead by ``rule``, or None where it stays.

    One that has said what it wishes counts those ``others`` as gone who said so before. Unless some block is unserved
    that nobody loads, it leaves none that is not served by somebody who stays, and is among those who ``answered``
    (None: all of them).
    """
    turn = mine.turn if mine.wishes else None
    others = [one for one in others if one.server != mine.server and one.model == mine.model]
    others = [one for one in others if max(one.blocks[1], one.target[1]) <= depth]  # anybody may announce anything
    placed = [one.reachable(0.0, span) for one in others if (span := one.counted(turn))]
    target = rule.move(mine.server, [*placed, mine.reachable(0.0)], depth)
    if target is None:
        return None
    present = [mine.span, *(one.span or one.counted() for one in others)]  # a wish may yet be taken back
    if len({block for span in present for block in span}) < depth:
        return target  # nobody gets through as it is
    staying = [one for one in others if (answered is None or one.server in answered) and one.counted(turn) == one.span]
    return target if set(mine.span) <= {block for one in staying for block in one.span} else None


class Rebalancer:
    """Moves the server that ``announcer`` speaks for, whose blocks are those of ``sessions`` and ``frozen``, by
    ``rule``. ``told`` is given its record after a move."""

    def __init__(
        self,
        rule: Rebalancing,
        announcer: Announcer,
        registry: Registry,
        sessions: Sessions,
        frozen: FrozenBlocks | None,
        limits: ServerLimits,
        told: Callable[[Record], None],
    ) -> None:
        self._rule, self._announcer, self._registry = rule, announcer, registry
        self._sessions, self._frozen, self._limits, self._told = sessions, frozen, limits, told

    async def run(self) -> None:
        """Look once a period, until cancelled. Raises ModelError for blocks that cannot be loaded."""
        await asyncio.sleep(self._limits.rebalance_s * random.random())  # not all at once
        while True:
            await self.look()
            await asyncio.sleep(self._limits.rebalance_s)

    async def look(self) -> bool:
        """Move if the swarm gains enough by it, and return whether it moved. Raises as ``run``."""
        target = self._wanted()
        while target is not None:
            self._announcer.say(target=(target.start, target.stop), wishes=time.time())
            answered = await self._announcer.tell_all()
            again = self._wanted(answered)
            if again == target:  # no await until the record says so: who asks hears of a wish, or of a move
                self._announcer.say(blocks=(0, 0), wishes=0.0)
                await self._move(target)
                return True
            self._announcer.say(target=(0, 0), wishes=0.0)  # somebody who was earlier goes there
            target = again
        return False

    def _wanted(self, answered: Collection[str] | None = None) -> range | None:
        known, depth = self._registry.live(time.time()), self._sessions.batcher.backend.depth
        return wanted(self._rule, self._announcer.record, known, depth, answered)

    async def _move(self, blocks: range) -> None:
        backend = self._sessions.batcher.backend
        await asyncio.gather(self._announcer.tell_all(), self._sessions.drain(self._limits.drain_s))
        self._sessions.slots.pool.forget()  # beginnings that it kept are of the other blocks
        await self._sessions.batcher.aside(lambda: backend.move(blocks))
        throughput = await self._sessions.batcher.aside(backend.measured_throughput)
        if self._frozen is not None:
            await self._frozen.move(blocks)
        # Sessions are taken again before the record names the new blocks: who reads it may open one at once.
        self._sessions.moving = False
        self._told(self._announcer.say(blocks=(blocks.start, blocks.stop), target=(0, 0), throughput=throughput))
        await self._announcer.tell_all()


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
class Running:
    """A server that is up: who speaks for it, the ``port`` that it listens on, its ``sessions``, what it knows of
    others, the ``ledger`` that it keeps, its ``frozen`` blocks where it trains, and who moves it if it may; ``failed``
    is done when it cannot go on."""

    announcer: Announcer
    port: int
    sessions: Sessions
    registry: Registry
    ledger: Ledger
    failed: asyncio.Future
    frozen: FrozenBlocks | None = None
    rebalancer: Rebalancer | None = None

    @property
    def record(self) -> Record:
        """What it says of itself now."""
        return self.announcer.record


@asynccontextmanager
async def serving(
    config: ServerConfig,
    model: str,
    make_backend: Callable[..., BlockBackend] = BlockBackend,
    told: Callable[[Record, int], None] = lambda *_: None,
) -> AsyncIterator[Running]:
    """The server of blocks of ``model`` (its sha256), up and announced for the time of the block.

    ``make_backend`` makes its blocks: those that compute wrongly have a class of their own. ``told`` is given its
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
    ledger = Ledger(public_hex(key))
    queue = PriorityQueue(config.limits.sessions, config.limits.waiting, ledger)
    sessions = Sessions(batcher, model, config.limits, Committer(key, model), queue)
    arbitrator = Arbitrator(config.folder, model, ledger, registry)
    frozen = None
    if config.trains:
        frozen = await batcher.aside(partial(FrozenBlocks, config.folder, config.blocks, config.dtype))
    contacts = Contacts(registry, config.access, backend.width)
    service = BlockService(sessions, contacts, arbitrator, config.access, frozen)
    throughput = await batcher.aside(backend.measured_throughput)
    server, port = await service.start(config.host, config.port)
    now = time.time()
    record = Record(
        public_hex(key),
        config.address or (f"[{config.host}]:{port}" if ":" in config.host else f"{config.host}:{port}"),
        (config.blocks.start, config.blocks.stop),
        model,
        throughput,
        started=now,
        issued=now,
        expires=now + config.limits.expiry_s,
        moves=config.rebalancing is not None,
        adapters=backend.adapters,
    )
    announcer = Announcer(record, key, contacts, config.peers, config.limits.expiry_s)
    service.announcer = announcer
    rebalancer = None
    if config.rebalancing is not None:
        rule = config.rebalancing
        rebalancer = Rebalancer(
            rule, announcer, registry, sessions, frozen, config.limits, lambda record: told(record, port)
        )
    tasks = [asyncio.create_task(batcher.serve()), asyncio.create_task(announcer.run())]
    tasks += [asyncio.create_task(rebalancer.run())] if rebalancer is not None else []
    failed = asyncio.gather(*tasks)
    try:
        await announcer.soon_announced()
        told(record, port)
        with (
            loops_elsewhere()
        ):  # on the batcher's thread, which has loaded, too: threads of this one would be in its way
            yield Running(announcer, port, sessions, registry, ledger, failed, frozen, rebalancer)
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
