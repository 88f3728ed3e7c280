"""A warm neighbour: a server of all layers in a process of its own, what leads to it, and its own running request."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from firsttoken.study.errors import SwarmError
from firsttoken.study.system.cgroup_limits import stay_on


@contextmanager
def warm_server(
    folder: Path, depth: int, cores: Collection[int], threads: int, dtype: str = "float32"
) -> Iterator[tuple[str, int]]:
    """The address of a server of all ``depth`` layers in ``folder``, and its process's number. Raises SwarmError."""
    command = ["firsttoken", "swarm", "serve", "--model", str(folder), "--blocks", f"0:{depth}", "--dtype", dtype]
    with process_of(command, cores, threads) as server:
        line = server.stdout.readline()
        if not (match := re.search(r" are served at (\S+) by ", line)):
            raise SwarmError(f"the neighbour did not start: {server.stderr.read().strip() or line}")
        yield match[1], server.pid


@contextmanager
def shaped(address: str, rtt_ms: float, gbit_per_s: float) -> Iterator[str]:
    """The address of a relay that leads to ``address``. Raises SwarmError."""
    port = address.rpartition(":")[2]
    rates = ["--rtt-ms", f"{rtt_ms:g}", "--gbit-per-s", f"{gbit_per_s:g}"]
    with process_of(["firsttoken_studies.combined.borrowed.relay", port, *rates]) as relay:
        if not (line := relay.stdout.readline().strip()):
            raise SwarmError(f"the relay did not start: {relay.stderr.read().strip()}")
        yield line


class OwnRequest:
    """A request that a client of ``address`` has running, in a process of its own, until :meth:`times_s` ends it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        if process.stdout.readline().strip() != "running":
            raise SwarmError(f"the neighbour's own request did not start: {process.stderr.read().strip()}")

    def times_s(self) -> list[float]:
        """End the request; return the times of its tokens on ``time.monotonic``."""
        output, _ = self._process.communicate("\n")
        return json.loads(output)


@contextmanager
def own_request(folder: Path, address: str, cores: Collection[int], threads: int) -> Iterator[OwnRequest]:
    """Run a request of the neighbour's own within the block. Raises SwarmError."""
    command = ["firsttoken_studies.combined.borrowed.background_client", str(folder), address]
    with process_of(command, cores, threads) as process:
        yield OwnRequest(process)


@contextmanager
def process_of(
    command: Sequence[str], cores: Collection[int] = (), threads: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """Run ``python -m`` with ``command``, on ``cores`` with ``threads`` threads (none named: as the system likes),
    until the end of the block."""
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        text=True,
        env=os.environ | environment,
        preexec_fn=partial(stay_on, cores) if cores else None,  # with gRPC in this process, better nothing behind fork
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
