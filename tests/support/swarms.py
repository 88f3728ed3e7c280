"""Swarms of a tiny model: servers in this process where nothing has to die, processes of their own where it has."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cutting import Relay
from plain_tokens import Plain

import firsttoken.options  # noqa: F401  (servers are copies of this process, and need it)
from firsttoken.study import warm
from firsttoken.swarm.actions import run  # noqa: F401  (as above)
from firsttoken.swarm.background import wait_for
from firsttoken.swarm.blocks import model_sha256
from firsttoken.swarm.limits import ServerLimits
from firsttoken.swarm.server import Running, ServerConfig, serving

DEPTH = 6


@dataclass(frozen=True)
class Asked:
    """A prompt and what the local model says to it."""

    prompt: list[int]
    plain: Plain


class Here:
    """Servers in this process, beside its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, model_sha256(folder)
        self._stack = AsyncExitStack()

    def serve(self, *spans: tuple[int, int], peers: Sequence[str] = (), **options: Any) -> list[Running]:
        """One server a span, each told of those before it."""
        ups: list[Running] = []
        limits = ServerLimits(**{"expiry_s": 30.0} | options.pop("limits", {}))
        known = list(peers)
        model = options.pop("model", self.model)
        for start, stop in spans:
            config = ServerConfig(
                self.folder, range(start, stop), torch.float32, peers=tuple(known), limits=limits, **options
            )
            ups.append(wait_for(self._stack.enter_async_context(serving(config, model))))
            known = [*peers, ups[0].record.address]
        return ups

    def close(self) -> None:
        wait_for(self._stack.aclose())


class Member:
    """A server process behind a relay: what others know of it is the relay's address."""

    def __init__(self, folder: Path, blocks: str, peers: Sequence[str]) -> None:
        self.blocks = blocks
        self.relay = Relay()
        command = ["swarm", "serve", "--model", str(folder), "--blocks", blocks, "--dtype", "float32"]
        command += ["--address", self.relay.address, *(word for peer in peers for word in ("--registry", peer))]
        self._process = subprocess.Popen(
            warm.command("firsttoken", command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.pid = 0

    def ready(self) -> Member:
        """Wait until it serves."""
        if not self.pid:
            line = self._process.stdout.readline()
            found = re.search(r"by process (\d+)", line)
            assert found, line
            self.pid = int(found[1])
            self.relay.lead_to(self._listening())
        return self

    def _listening(self) -> int:
        """The port that the process listens on: the announced one is the relay's."""
        inodes = {os.readlink(f"/proc/{self.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{self.pid}/fd")}
        for table in ("tcp", "tcp6"):
            for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    return int(fields[1].split(":")[1], 16)
        raise AssertionError("it does not listen")

    def heal(self) -> None:
        """Undo what does not end it."""
        self.relay.heal()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def cut(self) -> None:
        self.relay.cut()

    def hold(self) -> None:
        self.relay.hold()

    def close(self) -> None:
        self._process.kill()
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self.relay.close()


@contextmanager
def copied(address: Path) -> Iterator[None]:
    """A copy of this process, whose copies the servers are: none of them spends seconds on imports.

    Made before gRPC has begun, which does not survive being copied.
    """
    if not warm.possible() or warm.SOCKET in os.environ:
        yield  # each server imports everything itself, or there is such a copy
        return
    copy = os.fork()
    if not copy:
        try:
            os.setsid()
            silent = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(silent, stream)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not what pytest has put there
            warm.serve(str(address), ())
        finally:
            os._exit(0)
    while not address.exists():
        time.sleep(0.01)
    os.environ[warm.SOCKET] = str(address)
    yield
    del os.environ[warm.SOCKET]
    os.kill(copy, signal.SIGTERM)
    os.waitpid(copy, 0)
