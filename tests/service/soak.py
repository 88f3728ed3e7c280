"""Thousands of requests with random cancellations, disconnects and refusals: what does the service keep of them?

``python tests/service/soak.py --requests 10000`` serves a tiny random model in a process of its own and prints what
that process holds after every tenth of them: resident memory, threads, open files, sessions and KV blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from services import free_port, until, write_tiny

AT_ONCE = 24  # of which 8 run, in so few blocks that some are preempted, 14 wait and the others are refused
ODD = (b"{", b'{"prompt": 5}', b'{"prompt": "hi", "max_tokens": -1}', b'{"prompt": "hi", "model": "other"}')


class Held(NamedTuple):
    """What the service holds while nobody asks."""

    resident_kb: int
    threads: int
    files: int
    sessions: int
    blocks: int


@contextmanager
def service() -> Iterator[tuple[int, int]]:
    """Port and process id of a service of a tiny model."""
    with tempfile.TemporaryDirectory() as at:
        folder, port = Path(at) / "tiny", free_port()
        write_tiny(folder)
        command = [sys.executable, "-m", "firsttoken", "serve", str(folder), "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--max-running", "8", "--max-waiting", "14", "--kv-blocks", "128"], stdout=subprocess.DEVNULL
        )
        try:
            until(lambda: process.poll() is not None or _complete(port), "all stages serve")
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()


def held(port: int, pid: int) -> Held:
    """Once every session has ended."""
    until(lambda: _stage(port)["sessions"] == 0 and _stage(port)["engine"]["blocks_used"] == 0, "all places are free")
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = {line.split()[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
    files, stage = len(list(Path(f"/proc/{pid}/fd").iterdir())), _stage(port)
    found = int(numbers["VmRSS:"]), int(numbers["Threads:"]), files
    return Held(*found, stage["sessions"], stage["engine"]["blocks_used"])


async def ask(port: int, draw: random.Random) -> str:
    """One client's turn, and how it ended: the status, or how the client left."""
    way = draw.choices(["whole", "streamed", "leaves", "breaks off", "odd"], [3, 3, 2, 1, 1])[0]
    asked = {"prompt": "the inn"[: draw.randint(1, 7)], "max_tokens": draw.randint(1, 12), "n": draw.randint(1, 2)}
    asked |= {"stream": way != "whole", "seed": draw.randrange(99), "stop": draw.choice([[], ["e"]])}
    if way == "leaves":
        asked["max_tokens"] = 400
    body = draw.choice(ODD) if way == "odd" else json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += "Connection: close\r\n\r\n"
        writer.write(head.encode() + body[: len(body) // 2 if way == "breaks off" else None])
        if way == "breaks off":
            await writer.drain()
            return way
        status = (await reader.readline())[9:12].decode()
        if way == "leaves" and status == "200":
            await reader.read(draw.randint(1, 2000))
            return way
        await reader.read()
        if status == "429":
            await asyncio.sleep(draw.uniform(0, 0.1))  # else most of the requests would be refusals
        return status
    finally:
        writer.close()


async def wave(port: int, requests: int, seed: int) -> Counter[str]:
    """So many requests, ``AT_ONCE`` at a time, and how they ended."""
    draw, ends, left = random.Random(seed), Counter(), iter(range(requests))

    async def client() -> None:
        for _ in left:
            ends[await asyncio.wait_for(ask(port, draw), 60)] += 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return ends


def soak(requests: int, waves: int = 10) -> tuple[list[Held], Counter[str]]:
    """What is held after each wave, and how all ended."""
    rows, ends = [], Counter()
    with service() as (port, pid):
        for number in range(waves):
            ends += asyncio.run(wave(port, requests // waves, number))
            rows.append(held(port, pid))
            print(f"{(number + 1) * (requests // waves)}: {rows[-1]}", flush=True)
    return rows, ends


def _stage(port: int) -> dict:
    return httpx.get(f"http://127.0.0.1:{port}/stage", timeout=30).json()


def _complete(port: int) -> bool:
    try:
        return _stage(port)["state"] == "complete"
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    print(dict(soak(parser.parse_args().requests)[1]))
