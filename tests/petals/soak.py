"""Thousands of sessions that end well, are cancelled, broken off, forgotten and refused: what does a server keep?

``python tests/petals/soak.py --sessions 10000`` serves a tiny random model in a process of its own and prints what that
process holds after every tenth of them: resident memory, threads, open files, tasks, sessions, who waits, sequences and
KV blocks. torch and oneDNN keep code for up to 1,024 shapes of products, some for each number of tokens in a batch;
they are told to keep 16 here, or their memory would hide the server's (``--shapes 1024`` is what a user has).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import grpc
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from swarms import DEPTH, opening, varied

from firsttoken.petals.access import Access
from firsttoken.petals.checkpoint_blocks import model_sha256
from firsttoken.petals.contacts import encode_exchange
from firsttoken.petals.messages import EXCHANGE, MOST_TOKENS, PASS, SESSION, SequenceChunk
from firsttoken.petals.server import RunningServer, ServerConfig, serving
from firsttoken.petals.session import ServerLimits
from firsttoken.petals.tuning.passes import Pass, encode_pass
from firsttoken.petals.wire import encode

AT_ONCE = 24  # clients, of which 14 have a session, and the others are refused
LIMITS = ServerLimits(sessions=14, sequences=20, kv_tokens=1024, idle_s=0.5, expiry_s=5.0)
WIDTH = 32
WAYS = {  # how a client behaves, and how often
    "whole": 8,
    "cancels": 4,
    "cancels unread": 3,
    "breaks off": 2,
    "junk": 1,
    "falls silent": 1,
    "says nothing": 1,
    "another model": 1,
    "a step behind nothing": 1,
    "too long": 1,
    "trains": 1,
    "trains and goes": 1,
    "asks who is there": 1,
    "speaks no HTTP": 1,
}


class Held(NamedTuple):
    """What the server holds while nobody asks."""

    resident_kb: int
    threads: int
    files: int
    tasks: int
    sessions: int
    waiting: int
    sequences: int
    blocks: int


def _held(up: RunningServer) -> Held:
    sessions, status = up.sessions, Path("/proc/self/status").read_text()
    numbers = {line.split()[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
    pool = sessions.slots.pool
    return Held(
        int(numbers["VmRSS:"]),
        int(numbers["Threads:"]),
        len(list(Path("/proc/self/fd").iterdir())),
        len(asyncio.all_tasks()),
        sessions.open,
        up.frozen.waiting + up.frozen.busy,
        sessions.slots.held,
        pool.count - pool.free,
    )


async def serve(folder: Path) -> None:
    """Serve until nobody listens; each line that is read is answered by what is held, as soon as no session is."""
    config = ServerConfig(folder, range(DEPTH), torch.float32, limits=LIMITS, trains=True)
    async with serving(config, model_sha256(folder)) as up:
        print(up.record.address, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            for _ in range(600):
                if not any((held := _held(up))[4:]):
                    break
                await asyncio.sleep(0.05)
            print(json.dumps([held, dict(up.sessions.ends)]), flush=True)


class Clients:
    """Clients of the server at ``address``, which has ``model``."""

    def __init__(self, address: str, model: str, seed: int) -> None:
        self.address, self.model, self.draw = address, model, random.Random(seed)
        self.ends: Counter[str] = Counter()

    async def some(self, sessions: int) -> None:
        """So many sessions, ``AT_ONCE`` at a time."""
        left = iter(range(sessions))

        async def client() -> None:
            for _ in left:
                way = self.draw.choices(list(WAYS), list(WAYS.values()))[0]
                end = "hangs"
                with suppress(TimeoutError):
                    async with asyncio.timeout(30):
                        end = await self.ask(way)
                self.ends[f"{way}: {end}"] += 1
                if end == "RESOURCE_EXHAUSTED":
                    await asyncio.sleep(self.draw.uniform(0, 0.1))  # else most of the sessions would be refusals

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))

    async def ask(self, way: str) -> str:
        """One client's turn on a connection of its own; the status it had, or what it did."""
        if way == "speaks no HTTP":
            host, port = self.address.split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(self.draw.randbytes(self.draw.randint(0, 200)))
            writer.close()
            return "gone"
        async with Access().channel(self.address, WIDTH, DEPTH) as channel:
            try:
                if way == "asks who is there":
                    await channel.unary_unary(EXCHANGE)(self.draw.choice([encode_exchange([]), b"junk"]), timeout=30)
                elif way.startswith("trains"):
                    await self._train(channel, goes="goes" in way)
                else:
                    return await self._session(channel, way)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():
                    raise
                return "cancelled"
            return "OK"

    async def _train(self, channel: grpc.aio.Channel, *, goes: bool) -> None:
        call = channel.stream_unary(PASS)(metadata=self._headers())
        hidden = torch.randn(1, self.draw.randint(1, 8), WIDTH)
        data = encode_pass(Pass(hidden, {}, gradient=self.draw.choice([None, torch.ones_like(hidden)])))
        await call.write(data[: len(data) // 2] if self.draw.random() < 0.2 else data)
        if goes:
            await asyncio.sleep(self.draw.uniform(0, 0.01))
            call.cancel()
        else:
            await call.done_writing()
        await call

    async def _session(self, channel: grpc.aio.Channel, way: str) -> str:
        call = channel.stream_stream(SESSION)(metadata=self._headers("b" * 64 if way == "another model" else ""))
        with suppress(asyncio.InvalidStateError):  # it is over, and its status says why
            sequences, begun = self.draw.randint(1, 2), 5 if way == "a step behind nothing" else 0
            known = MOST_TOKENS + 1 if way == "too long" else self.draw.randint(1, 40)
            if way in ("says nothing", "another model"):
                await call.read()
            elif way == "junk":
                await call.write(self.draw.randbytes(50))
                await call.read()
            else:
                spans = [SequenceChunk(number, begun, begun + known) for number in range(sequences)]
                if await self._step(call, spans, reads=way != "cancels unread"):
                    for step in range(self.draw.randint(0, 4)):
                        at = begun + known + step
                        await self._step(call, [SequenceChunk(number, at, at + 1) for number in range(sequences)])
                    if way == "falls silent":
                        await call.read()
                    elif way == "whole":
                        await call.write(encode(None, "float32", finished=[0]))
                        await call.done_writing()
                        await call.read()
            if way.startswith("cancels"):
                await asyncio.sleep(self.draw.uniform(0, 0.01))
                call.cancel()
            elif way == "breaks off":
                await channel.close()
        return (await call.code()).name

    async def _step(self, call: grpc.aio.StreamStreamCall, spans: list[SequenceChunk], *, reads: bool = True) -> bool:
        """Whether it was answered."""
        hidden = torch.randn(sum(one.end - one.start for one in spans), WIDTH)
        await call.write(encode(hidden, "float32", spans))
        return reads and await call.read() is not grpc.aio.EOF

    def _headers(self, model: str = "") -> tuple[tuple[str, str], ...]:
        return opening(model or self.model)


@contextmanager
def server(shapes: int) -> Iterator[tuple[subprocess.Popen, str, str]]:
    """A server of a tiny model in its process, its address, and the model's sha256."""
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at) / "tiny"
        varied().save_pretrained(folder)
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(folder)]
        kept = os.environ | dict.fromkeys(["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"], str(shapes))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=kept) as process:
            yield process, process.stdout.readline().strip(), model_sha256(folder)
            process.stdin.close()


def soak(sessions: int, shapes: int = 16, waves: int = 10) -> tuple[list[Held], Counter[str], dict[str, int]]:
    """What is held after each wave, how all ended for the clients, and for the server."""
    rows, ends, begun = [], Counter(), time.monotonic()
    with (
        server(shapes) as (process, address, model),
        asyncio.Runner() as runner,
    ):  # one loop, as gRPC keeps what is of it
        for number in range(waves):
            clients = Clients(address, model, number)
            runner.run(clients.some(sessions // waves))
            ends += clients.ends
            process.stdin.write("\n")
            process.stdin.flush()
            held, told = json.loads(process.stdout.readline())
            rows.append(Held(*held))
            print(f"{(number + 1) * (sessions // waves)} in {time.monotonic() - begun:.0f} s: {rows[-1]}", flush=True)
    return rows, ends, told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--shapes", type=int, default=16, metavar="N", help="whose code is kept (default: 16)")
    parser.add_argument("--serve", type=Path, metavar="FOLDER", help="be the server")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        os._exit(0)
    rows, ends, told = soak(options.sessions, options.shapes)
    print(dict(sorted(ends.items())), told, sep="\n")
    assert not any("hangs" in end for end in ends), "a client was left without an answer"
    # gRPC has a few threads and files more or less, whoever asks
    assert not any(any(row[4:]) for row in rows), "something is left"
    assert rows[-1].threads < rows[1].threads + 5 and rows[-1].files < rows[1].files + 5, "threads or files are left"
    assert rows[-1].resident_kb < 1.05 * rows[1].resident_kb, "memory grows"
