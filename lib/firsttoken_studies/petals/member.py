"""Server processes, some behind a relay of this one, for tests and experiments to kill, stop and cut off."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from firsttoken.study import warm
from firsttoken.study.errors import SwarmError
from firsttoken_studies.petals.relay import Relay

FAULTS = {
    "kill": "killed (SIGKILL)",
    "stop": "stopped (SIGSTOP)",
    "cut": "its link reset",
    "hold": "its link silent",
}
"""What may befall a member, each the name of its method."""


class ServerProcess:
    """``firsttoken swarm serve`` of ``blocks`` (a:b) in float32, known to others by ``address`` (HOST:PORT; by default
    where it listens); one that ``trains`` is trained through, too; ``threads`` compute (0: one a core)."""

    def __init__(
        self, folder: Path, blocks: str, peers: Sequence[str], address: str = "", trains: bool = False, threads: int = 0
    ) -> None:
        self.blocks, self.address = blocks, address
        command = ["swarm", "serve", "--model", str(folder), "--blocks", blocks, "--dtype", "float32"]
        command += ["--train"] * trains + ["--threads", str(threads)]
        command += ["--address", address, *(word for peer in peers for word in ("--registry", peer))]
        self._process = subprocess.Popen(
            warm.command("firsttoken", command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._port = self.pid = 0

    def ready(self) -> Self:
        """Wait until it serves. Raises SwarmError when it ends instead."""
        if not self.pid:
            line = self._process.stdout.readline()
            found = re.search(r"at (\S+) by process (\d+)(?:, on port (\d+) here)?;", line)
            if not found:
                said = self._process.stderr.read().strip().splitlines() or ["it says nothing"]
                raise SwarmError(f"a server of blocks {self.blocks} did not start: {said[-1]}")
            self.address, self.pid, self._port = found[1], int(found[2]), int(found[3] or 0)
        return self

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP: its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)

    def heal(self) -> None:
        """Undo what does not end it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()


class SwarmMember(ServerProcess):
    """Behind a relay, whose link takes ``delay_s`` seconds each way."""

    def __init__(self, folder: Path, blocks: str, peers: Sequence[str], delay_s: float = 0.0) -> None:
        self.relay = Relay(delay_s)
        super().__init__(folder, blocks, peers, self.relay.address)

    def ready(self) -> Self:
        new = not self.pid
        super().ready()
        if new:
            self.relay.lead_to(self._port)
        return self

    def cut(self) -> None:
        """Its link is reset."""
        self.relay.cut()

    def hold(self) -> None:
        """Its link falls silent."""
        self.relay.hold()

    def heal(self) -> None:
        self.relay.heal()
        super().heal()

    def close(self) -> None:
        super().close()
        self.relay.close()
