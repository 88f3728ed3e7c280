"""Honest clients of a swarm beside others that cancel, flood, vanish and hoard, in schedules that a seed draws."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch
from slots import check_slots
from swarms import APART, DEPTH, Asked, Here, asking, opening

from firsttoken.engine.request import Sampling
from firsttoken.petals.event_loop import begin, wait_for
from firsttoken.petals.local_swarm import varied_model
from firsttoken.petals.messages import SESSION, SequenceChunk
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.server import RunningServer
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.wire import encode

WIDTH, HALF = 32, DEPTH // 2
SPANS = ((0, HALF), (HALF, DEPTH))
LIMITS = {"sessions": 8, "sequences": 24, "kv_tokens": 768, "batch_tokens": 256, "idle_s": 2.0, "spare_s": 0.5}
TIMEOUTS = Timeouts(step_s=5.0, ban_s=0.1, refresh_s=30.0, find_s=20.0)


@dataclass
class Found:
    """What came of schedules: honest answers, and how many of them were ``wrong``, ``failed`` or ``late``; seconds of
    the latest above twice its time alone; how the sessions of those who disturb ended."""

    answers: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    late: int = 0
    above_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)


class Disturber:
    """A client that does what ``way`` says to one server until it is stopped, drawing from ``draw``."""

    def __init__(self, up: RunningServer, model: str, draw: random.Random, ends: Counter[str]) -> None:
        self._up, self._draw, self._ends = up, draw, ends
        start, stop = up.record.blocks
        self._layers = range(start, stop)
        self._opened = opening(model, f"{start}:{stop}")
        self.ways: dict[str, Callable[[grpc.aio.Channel], Awaitable[None]]] = {
            "cancels": self._cancels,
            "breaks off": self._breaks_off,
            "says nothing": self._says_nothing,
            "hoards": self._hoards,
            "floods": self._floods,
            "falls silent": self._falls_silent,
            "says nonsense": self._says_nonsense,
        }

    async def run(self, way: str) -> None:
        """Until it is cancelled."""
        while True:
            async with grpc.aio.insecure_channel(self._up.record.address, APART) as channel:
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    for _ in range(20):
                        await self.ways[way](channel)
            self._ends[way] += 1
            await asyncio.sleep(self._draw.uniform(0, 0.01))

    def _call(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall:
        return channel.stream_stream(SESSION)(metadata=self._opened)

    def _step(self, number: int, start: int, end: int) -> bytes:
        """A step that enters any of the layers."""
        first = self._draw.choice([0, *self._layers])
        return encode(torch.randn(end - start, WIDTH), "float32", [SequenceChunk(number, start, end)], first=first)

    async def _cancels(self, channel: grpc.aio.Channel) -> None:
        calls = [self._call(channel) for _ in range(self._draw.randint(1, 4))]
        for call in calls:
            await call.write(self._step(0, 0, self._draw.randint(1, 100)))
        for call in calls:
            await asyncio.sleep(self._draw.choice([0, 0, 0.001, 0.004]))
            call.cancel()

    async def _breaks_off(self, channel: grpc.aio.Channel) -> None:
        for number in range(self._draw.randint(1, 3)):
            await self._call(channel).write(self._step(number, 0, self._draw.randint(1, 60)))
        await asyncio.sleep(self._draw.uniform(0, 0.004))
        await channel.close()
        raise asyncio.InvalidStateError

    async def _says_nothing(self, channel: grpc.aio.Channel) -> None:
        calls = [self._call(channel) for _ in range(LIMITS["sessions"])]
        for _ in range(3):
            for call in calls:
                if not call.done():
                    await call.write(encode(None, "float32", finished=[1]))
            await asyncio.sleep(0.01)

    async def _hoards(self, channel: grpc.aio.Channel) -> None:
        call = self._call(channel)
        for number in range(LIMITS["sequences"]):
            await call.write(self._step(number, 0, self._draw.randint(10, 90)))
            await call.read()
        await asyncio.sleep(self._draw.uniform(0, 0.2))

    async def _floods(self, channel: grpc.aio.Channel) -> None:
        async def one() -> None:
            call, at = self._call(channel), 0
            for _ in range(self._draw.randint(1, 6)):
                tokens = self._draw.randint(1, 40)
                await call.write(self._step(0, 0 if self._draw.random() < 0.3 else at, at + tokens))
                await call.read()
                at += tokens
            call.cancel()

        await asyncio.gather(*(one() for _ in range(self._draw.randint(2, 6))), return_exceptions=True)
        await asyncio.sleep(0)

    async def _falls_silent(self, channel: grpc.aio.Channel) -> None:
        call = self._call(channel)
        await call.write(self._step(0, 0, self._draw.randint(1, 50)))
        await call.read()
        await call.read()  # until it is ended

    async def _says_nonsense(self, channel: grpc.aio.Channel) -> None:
        call = self._call(channel)
        hidden = torch.full((3, WIDTH), self._draw.choice([1e38, 3e38, -1e30]))
        said = [encode(hidden, "float32", [SequenceChunk(0, 0, 3)]), self._step(0, 7, 9), self._draw.randbytes(40)]
        await call.write(self._draw.choice(said))
        await call.read()


class Soak:
    """Two servers and three honest clients of the model in ``folder``, as a context manager."""

    def __init__(self, folder: Path, asked: list[Asked]) -> None:
        self._asked, self._stack = asked, ExitStack()
        here = Here(folder)
        self._stack.callback(here.close)
        self.model = here.model
        self.ups = here.serve(*SPANS, limits=LIMITS)
        doors = [up.record.address for up in self.ups]
        self.honest = [RemoteModel(folder, doors, timeouts=TIMEOUTS) for _ in range(3)]
        for one in self.honest:
            self._stack.callback(one.close)
        self._threads = self._stack.enter_context(ThreadPoolExecutor(len(self.honest)))
        for one in self.honest:  # their first steps are slower
            self._answer(one, asked[0])
        self._alone_s = [self._answer(self.honest[0], what)[1] for what in asked]

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def schedule(self, seed: int, found: Found) -> None:
        """One of them, whose answers are added to what was ``found``."""
        draw = random.Random(seed)
        honest = self.honest[: draw.randint(1, 3)]
        places = [draw.randrange(len(self._asked)) for _ in honest]
        asked = [self._asked[place] for place in places]
        disturbers = [
            Disturber(draw.choice(self.ups), self.model, random.Random(f"{seed} {number}"), found.ends)
            for number in range(draw.randint(1, 3 if len(honest) < 3 else 2))
        ]
        ways = [draw.choice(list(one.ways)) for one in disturbers]
        running = [begin(one.run(way)) for one, way in zip(disturbers, ways, strict=True)]
        checking = begin(self._check())
        time.sleep(draw.uniform(0, 0.05))
        try:
            said = list(self._threads.map(self._answer, honest, asked))
        finally:
            for one in running:
                one.cancel()
        assert not checking.done(), checking.exception()
        checking.cancel()
        for place, (tokens, took_s) in zip(places, said, strict=True):
            what, alone_s = self._asked[place], self._alone_s[place]
            found.answers += 1
            found.above_s = max(found.above_s, took_s - 2 * alone_s)
            if took_s > 2 * alone_s + TIMEOUTS.step_s:
                found.late += 1
                print(f"schedule {seed} ({', '.join(ways)}): {took_s:.1f} s, {alone_s:.1f} s alone", flush=True)
            if isinstance(tokens, str):
                found.failed.append(f"{seed}: {tokens}")
            elif tokens != what.plain.tokens:
                found.wrong += 1
                print(f"schedule {seed}: {tokens} is not {what.plain.tokens}", flush=True)

    def left(self) -> None:
        """Wait until nothing is left of those who disturbed; the books of what is there must be right."""

        async def gone() -> None:
            async with asyncio.timeout(30):
                for up in self.ups:
                    room = up.sessions.slots
                    while up.sessions.open > len(self.honest) or room.held or room._leased:
                        await asyncio.sleep(0.02)
                    check_slots(room)
                    assert room.pool.free == room.pool.count

        wait_for(gone())

    async def _check(self) -> None:
        while True:
            for up in self.ups:
                check_slots(up.sessions.slots)
            await asyncio.sleep(0.003)

    @staticmethod
    def _answer(one: RemoteModel, what: Asked) -> tuple[list[int] | str, float]:
        """What it says, or why not, and the seconds that it took."""
        begun = time.monotonic()
        request = one.engine.submit(what.prompt, Sampling(len(what.plain.tokens)))
        try:
            one.engine.run()
        except Exception as error:
            one.engine.cancel(request)
            return f"{type(error).__name__}: {error}", time.monotonic() - begun
        return list(request.output), time.monotonic() - begun


def questions(count: int) -> list[Asked]:
    """Prompts of 5 to 60 tokens and the local model's answers of 3 to 6."""
    ask, draw = asking(varied_model()), random.Random(0)
    return [ask(draw.randint(5, 60), draw.randint(3, 6)) for _ in range(count)]
