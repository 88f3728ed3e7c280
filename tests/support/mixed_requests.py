"""Requests of all kinds to a service with variants, stored prefixes, shared blocks and preemption, drawn at random."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

from services import tiny_model, write_endless

from firsttoken.__main__ import main

VARIANTS = ("qa", "chat")
MODELS = ("tiny", *VARIANTS)
STORED = (
    "the inn in the hat is a long way from here, and ",
    "a hat on the inn is not in the tin, it is one that ",
    "in that night the ten of them ate at the inn; then ",
)
LONGEST = 160  # tokens of a prompt and its answer
AT_ONCE = 20  # of which RUNNING run, in so few blocks that some are preempted, WAITING wait, and the others are refused
RUNNING, WAITING, BLOCKS = 8, 14, 36
WAYS = {  # what a client asks, or does, and how often
    "whole": 8,
    "streamed": 6,
    "leaves": 3,
    "breaks off": 1,
    "another model": 1,
    "too long": 1,
    "odd": 1,
}
ODD = (b"{", b'{"prompt": 5}', b'{"prompt": "hi", "max_tokens": -1}', b'{"prompt": "hi", "n": 99}')


def write_place(place: Path) -> None:
    """Write a tiny model, an adapter for each of ``VARIANTS``, and a store in which the model and each variant has
    what it computed of each of ``STORED``."""
    from fine_tunes import tuned, written

    model, store = place / MODELS[0], place / "store"
    write_endless(model)
    for seed, name in enumerate(VARIANTS):
        written(tuned(tiny_model(), seed, ["q_proj", "up_proj"]), place / name)
    for text in STORED:
        put = ["prefix", "put", str(store), text, "--model", str(model)]
        for adapter in ([], *(["--adapter", str(place / name)] for name in VARIANTS)):
            assert main([*put, *adapter]) == 0


async def ask(port: int, draw: random.Random) -> str:
    """One client's turn, and how it ended: the status, or how the client left."""
    way = draw.choices(list(WAYS), list(WAYS.values()))[0]
    own = "".join(draw.choices("thein ao,", k=draw.randint(1, 40)))
    prompt = draw.choice(STORED) + own if draw.random() < 0.6 else own
    asked = {"prompt": prompt, "max_tokens": draw.randint(1, 60), "n": draw.choice((1, 1, 1, 2))}
    asked |= {"model": draw.choice(MODELS), "stream": way != "whole", "seed": draw.randrange(99)}
    asked |= {"temperature": draw.choice((0, 1)), "stop": draw.choice(([], ["e"]))}
    changes = {"another model": {"model": "other"}, "too long": {"prompt": prompt * 9}, "leaves": {"max_tokens": 50}}
    asked |= changes.get(way, {})
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
            await asyncio.sleep(draw.uniform(0, 0.2))  # else most of the requests would be refusals
        return status
    finally:
        writer.close()


async def wave(port: int, requests: int, seed: int) -> Counter[str]:
    """So many requests, ``AT_ONCE`` at a time, and how they ended.

    Each has a generator of its own, so that what it asks is the same whatever order the clients come in.
    """
    ends: Counter[str] = Counter()
    left = iter(range(requests))

    async def client() -> None:
        for number in left:
            ends[await asyncio.wait_for(ask(port, random.Random(f"{seed} {number}")), 120)] += 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return ends
