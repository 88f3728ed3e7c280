"""Swarms of a tiny model: servers in this process, where nothing has to die."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plain_tokens import TOLERANCE, Plain, check_greedy, generated
from transformers import PreTrainedModel

from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.checkpoint_blocks import model_sha256
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import HEADERS, VERSION
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.server import RunningServer, ServerConfig, serving
from firsttoken.petals.session import IdleClientError, ServerLimits
from firsttoken_studies.petals import spans
from firsttoken_studies.petals.fleet import ProxiedServer, ServerProcess
from firsttoken_studies.record import kernel_forkserver

DEPTH = 6
APART = [("grpc.use_local_subchannel_pool", 1)]  # of a channel: a connection, and so a client, of its own


@dataclass(frozen=True)
class Asked:
    """A prompt and what the local model says to it."""

    prompt: list[int]
    plain: Plain


def opening(model: str, blocks: str = f"0:{DEPTH}", coding: str = "float32") -> tuple[tuple[str, str], ...]:
    """The headers with which a client opens a session with a server of ``blocks`` of ``model``, or sends it a pass."""
    return tuple(zip(HEADERS, (VERSION, model, blocks, coding), strict=True))


def asking(model: PreTrainedModel) -> Callable[[int, int], Asked]:
    """Makes a prompt of so many tokens and the greedy answer to it of so many, none of them a near tie."""
    draw = torch.Generator().manual_seed(4)

    def ask(length: int, answer: int) -> Asked:
        while True:
            prompt = torch.randint(256, (length,), generator=draw).tolist()
            plain = generated(model, prompt, answer)
            if plain.margin > TOLERANCE and len(set(plain.tokens)) > answer // 2:
                return Asked(prompt, plain)

    return ask


class Here:
    """Servers in this process, beside its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, model_sha256(folder)
        self._stack = AsyncExitStack()

    def serve(self, *spans: tuple[int, int], peers: Sequence[str] = (), **options: Any) -> list[RunningServer]:
        """One server a span, each told of those before it."""
        ups: list[RunningServer] = []
        limits = ServerLimits(**{"expiry_s": 30.0} | options.pop("limits", {}))
        known = list(peers)
        model = options.pop("model", self.model)
        make_backend = options.pop("make_backend", BlockBackend)
        for start, stop in spans:
            config = ServerConfig(
                self.folder, range(start, stop), torch.float32, peers=tuple(known), limits=limits, **options
            )
            ups.append(wait_for(self._stack.enter_async_context(serving(config, model, make_backend))))
            known = [*peers, ups[0].record.address]
        return ups

    def close(self) -> None:
        wait_for(self._stack.aclose())


@contextmanager
def servers_imported() -> Iterator[None]:
    """Servers are copies of one process that has imported what they need.

    It is a process of its own, not a copy of this one: another thread of this one may hold a lock at that moment, for
    which the copy would wait for ever.
    """
    before = os.environ.get("JUPYTER_PATH")
    with kernel_forkserver.warmed((*spans.IMPORTS, "firsttoken_serve.swarm.swarm_actions")):
        if before is None:  # servers alone: a notebook of another test starts a kernel of its own
            os.environ.pop("JUPYTER_PATH", None)
        else:
            os.environ["JUPYTER_PATH"] = before
        yield


def answer(model: RemoteModel, prompt: list[int], tokens: int) -> list[int]:
    """The greedy tokens of the client's model."""
    return model.generate(torch.tensor([prompt]), tokens)[0, len(prompt) :].tolist()


def says(model: RemoteModel, one: Asked) -> None:
    """Assert that the client's model says what the local one does."""
    tokens = len(one.plain.tokens)
    assert check_greedy(answer(model, one.prompt, tokens), one.plain) == tokens


def spoil(up: RunningServer, value: float = math.nan) -> None:
    """The blocks of this server answer ``value`` from now on."""
    for module in up.sessions.batcher.backend._segment.modules:
        module.forward = lambda hidden, *_, **__: torch.full_like(hidden, value)


async def lose(up: RunningServer) -> None:
    """End the sessions of this server, as those of clients that were idle for too long."""
    for session in up.sessions._open:
        session.cancel(IdleClientError("it is lost"))


def part(model: RemoteModel) -> None:
    """End its sessions with servers, in the thread that they are of: gRPC's calls stand no other."""

    async def close() -> None:
        model.chain.close()

    wait_for(close())


class Valve:
    """Takes the place of a relay's event: while it is closed, only so many pieces pass as are let through."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: float = math.inf

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0)
            self._left -= 1

    def let(self, pieces: float) -> None:
        """From now on so many pass: 0 closes it, infinity opens it."""
        with self._changed:
            self._left = pieces
            self._changed.notify_all()

    def set(self) -> None:
        """Open it: the relay that it belongs to ends."""
        self.let(math.inf)


def lend(folder: Path, spans: Sequence[str]) -> None:
    """Server processes for whoever started this one, told by a line of JSON: [address, blocks, process id] of each.
    They end with its standard input. A span a:b@HOST:PORT is of one that says it is there; one of a:b~ is behind a link
    that lets no more pieces pass than the last line of standard input says."""
    with servers_imported(), ExitStack() as stack:
        ups: list[ServerProcess] = []
        valves: list[Valve] = []
        for blocks, _, address in (span.partition("@") for span in spans):
            known = [up.address for up in ups[:1]]
            if blocks.endswith("~"):
                ups.append(ProxiedServer(folder, blocks.removesuffix("~"), known))
                valves.append(Valve())
                ups[-1].proxy._flowing = valves[-1]
            else:
                ups.append(ServerProcess(folder, blocks, known, address, threads=1))
            stack.callback(ups[-1].close)
            ups[-1].ready()
        print(json.dumps([(up.address, up.blocks, up.pid) for up in ups]), flush=True)
        for line in sys.stdin:
            for valve in valves:
                valve.let(float(line))
