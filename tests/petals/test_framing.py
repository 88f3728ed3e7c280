"""An honest server stands, whatever a client does to its sequences before it accuses: what is signed of an answer is of
the keys and values that it was computed from."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import grpc
import pytest
import torch
from swarms import opening

from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import SESSION, SequenceChunk
from firsttoken.petals.trust.arbitration import TOLERANCE, difference, recomputed
from firsttoken.petals.trust.commitments import Charge, Evidence, read_commitment
from firsttoken.petals.wire import decode, encode
from firsttoken.study.errors import SwarmError

WIDTH, LAYERS, MOST, NUMBERS = 32, 6, 96, range(2)
BLOCK = 16  # tokens


@dataclass
class Accuser:
    """A client that keeps the rows which it has sent of each sequence last, and holds every signed answer against them:
    what it goes back over is what the server has to know."""

    here: object
    server: object
    draw: random.Random
    rows: dict[int, torch.Tensor] = field(default_factory=lambda: {n: torch.zeros(MOST, WIDTH) for n in NUMBERS})
    cached: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    async def act(self, steps: int) -> None:
        async with grpc.aio.insecure_channel(self.server.record.address) as channel:
            call = None
            for _ in range(steps):
                if call is None:
                    call = channel.stream_stream(SESSION)(metadata=opening(self.here.model))
                    self.cached.clear()
                try:
                    await self.draw.choice([self.step, self.step, self.step, self.forget])(call)
                except grpc.aio.AioRpcError as error:
                    self.ends[error.code().name] += 1
                    call = None

    def chunk(self, number: int) -> SequenceChunk:
        """Behind what is there, or over it from anywhere or from the end of a block on."""
        cached = min(self.cached[number], MOST - 1)
        start = self.draw.choice([cached, cached, cached // BLOCK * BLOCK, self.draw.randint(0, cached)])
        return SequenceChunk(number, start, min(MOST, start + self.draw.choice([1, 2, BLOCK, 20])))

    async def step(self, call) -> None:
        numbers = self.draw.sample(NUMBERS, self.draw.choice([1, 1, 2]))
        chunks, first = [self.chunk(number) for number in numbers], self.draw.choice([0, 0, 0, 3])
        parts = [torch.randn(one.end - one.start, WIDTH) * self.draw.choice([1, 1, 1, 0.01, 1000]) for one in chunks]
        hidden = torch.cat(parts)
        await call.write(encode(hidden, "float32", chunks, first=first))
        answer = decode(await self.heard(call), "float32", WIDTH, torch.float32, len(hidden))
        for one, part in zip(chunks, parts, strict=True):
            self.rows[one.number][one.start : one.end] = part
            self.cached[one.number] = one.end
        self.ends["signed" if answer.commitment else "unsigned"] += 1
        if answer.commitment:
            self.accuse(answer.commitment, chunks, answer.hidden)

    def accuse(self, text: str, chunks: list[SequenceChunk], hidden: torch.Tensor) -> None:
        commitment = read_commitment(text)
        outputs = hidden.split([one.end - one.start for one in chunks])
        for place, one in enumerate(chunks):
            inputs = self.rows[one.number][: one.end]
            evidence = Evidence(Charge(commitment, place), inputs, outputs[place])
            try:
                evidence.check()
            except SwarmError:
                self.ends["no evidence"] += 1  # of other rows than were sent last
                continue
            self.ends["judged"] += 1
            honest = recomputed(self.here.folder, range(*commitment.layers), inputs)[one.start :]
            assert difference(outputs[place], honest) <= TOLERANCE, (one, self.ends)

    async def forget(self, call) -> None:
        number = self.draw.choice(NUMBERS)
        await call.write(encode(None, "float32", finished=[number]))
        self.cached[number] = 0

    async def heard(self, call) -> bytes:
        if (data := await call.read()) is grpc.aio.EOF:
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(await call.code(), none, none, await call.details())
        return data


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_client_goes_back_over_convicts_no_honest_server(here, seed):
    (server,) = here.serve((0, LAYERS))
    accuser = Accuser(here, server, random.Random(seed))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        wait_for(accuser.act(120))
    assert accuser.ends["judged"] > 0 and not accuser.ends["unsigned"], accuser.ends
