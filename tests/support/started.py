"""This clone's programs as processes, for tests that run in an environment where the package is not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import until

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("FIRSTTOKEN_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
OURS = dict(os.environ, PYTHONPATH=os.pathsep.join(str(ROOT / part) for part in ("lib", "tests/support")))
TIMEOUT_S = 180.0
KEY = "sk-for-the-tests"


def written(writer: str, folder: Path) -> Path:
    """``folder`` as the function ``writer`` of services.py makes it."""
    code = f"import sys; from pathlib import Path; from services import {writer}; {writer}(Path(sys.argv[1]))"
    subprocess.run([PYTHON, "-c", code, str(folder)], check=True, env=OURS, timeout=TIMEOUT_S)
    return folder


def asked(url: str) -> Any:
    """What a GET brings; None where nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except OSError:
        return None


@contextmanager
def served(folder: Path, *options: str, **environment: str) -> Iterator[str]:
    """The URL of a service of ``folder`` whose stages have all arrived."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, command = f"http://127.0.0.1:{port}", [PYTHON, "-m", "firsttoken", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen([*command, *options], env=OURS | environment, stdout=subprocess.DEVNULL)

    def complete() -> bool:
        assert process.poll() is None
        return (asked(f"{url}/stage") or {}).get("state") == "complete"

    try:
        until(complete, "all stages serve")
        yield url
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Lent:
    """Servers of a swarm: blocks and process id by address."""

    servers: dict[str, tuple[str, int]]
    _process: subprocess.Popen[str]

    def let(self, pieces: float) -> None:
        """Of what goes over the links of a:b~, so many pieces pass from now on: 0 holds them, infinity heals them."""
        self._process.stdin.write(f"{pieces}\n")
        self._process.stdin.flush()


@contextmanager
def swarm_of(folder: Path, *spans: str) -> Iterator[Lent]:
    """Servers of ``spans`` of the model in ``folder``. A span is a:b, a:b~ behind a link that can be held, or
    a:b@HOST:PORT of one that says it is there."""
    code = "import sys; from pathlib import Path; from swarms import lend; lend(Path(sys.argv[1]), sys.argv[2:])"
    command = [PYTHON, "-c", code, str(folder), *spans]
    process = subprocess.Popen(command, env=OURS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:  # closes its input, with which its servers end
        yield Lent({address: (blocks, pid) for address, blocks, pid in json.loads(process.stdout.readline())}, process)
