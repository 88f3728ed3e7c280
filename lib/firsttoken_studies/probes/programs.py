"""Other programs as processes: started with their children in a session of their own, and always ended."""

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from firsttoken.study.errors import FirstTokenError

ENDING_S = 30.0  # that a program has after SIGTERM
_POLL_S = 0.2


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str], ending_s: float = ENDING_S
) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` as it runs, what it says in ``log``. At the end of the block, whatever ends that, it and all that it
    has started are asked to end, and killed after ``ending_s`` seconds."""
    with log.open("wb") as lines:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=lines, stderr=lines, env=dict(environment), start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ending_s)
        with suppress(ProcessLookupError):  # children that outlive it, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A port of loopback that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_healthy(process: subprocess.Popen[bytes], port: int, patience_s: float, log: Path, subject: str) -> None:
    """Return once ``GET /health`` on ``port`` of loopback answers 200.

    Raises FirstTokenError with the last line of ``log`` where the process ends before, or after ``patience_s`` seconds.
    """
    until = time.monotonic() + patience_s
    while process.poll() is None and time.monotonic() < until:
        if _healthy(port):
            return
        time.sleep(_POLL_S)
    why = "ended" if process.poll() is not None else f"did not answer in {patience_s:g} s"
    raise FirstTokenError(f"{subject} {why}: {last_line(log)}")


def last_line(log: Path) -> str:
    """The last line of what a program said, at most 300 characters of it."""
    lines = log.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    return " ".join(lines[-1].split())[:300]


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
