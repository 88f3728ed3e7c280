"""A server that goes where the swarm gains by it, while it serves (PETALS, section 3.2).

Turns are taken by records alone. Who means to move says so, exchanges with every member, and goes only if the move is
still wanted with all counted who said so earlier. Of two that reach each other one hears of the other so, in whatever
order their messages come: who was asked before it had decided knows the other's wish when it does, and who was asked
later answers that it has gone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Iterable

from firsttoken.petals.announcer import Announcer
from firsttoken.petals.limits import ServerLimits
from firsttoken.petals.placement import Rebalancing
from firsttoken.petals.records import Record
from firsttoken.petals.registry import Registry
from firsttoken.petals.session import Sessions
from firsttoken.petals.tuning.frozen import FrozenBlocks


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
        """Move if the swarm gains enough by it; whether it did. Raises as ``run``."""
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
        known, depth = self._registry.live(time.time()), self._sessions.batcher.stack.depth
        return wanted(self._rule, self._announcer.record, known, depth, answered)

    async def _move(self, blocks: range) -> None:
        stack = self._sessions.batcher.stack
        await asyncio.gather(self._announcer.tell_all(), self._sessions.drain(self._limits.drain_s))
        await self._sessions.batcher.aside(lambda: stack.move(blocks))
        throughput = await self._sessions.batcher.aside(stack.measured_throughput)
        if self._frozen is not None:
            await self._frozen.move(blocks)
        self._sessions.moving = False
        self._told(self._announcer.say(blocks=(blocks.start, blocks.stop), target=(0, 0), throughput=throughput))
        await self._announcer.tell_all()
