"""A process that has imported what workers need, and is copied for each of them.

To import torch takes 1.5 to 3 s of two AVX2 cores, for which every request of a lost worker would wait; a copy is there
in milliseconds. It may be copied as it holds no tensor and has started no thread. macOS' libraries do not survive that:
there each worker is a process of its own.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress

FORKS = sys.platform != "darwin"


class WorkerGone(Exception):
    """It died, or said nothing for as long as it may."""


class WorkerForkserver:
    """One worker at a time. All of it ends when this process does, however that ends: its standard input then is at its
    end. ``status_fd`` becomes readable when the worker has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.worker = 0  # its process id; 0 while there is none

    @property
    def status_fd(self) -> int:
        """A file descriptor."""
        return self._process.stdout.fileno()

    def spawn(self, address: str, timeout_s: float) -> int:
        """The process id of a new worker, which will connect to ``address``. Raises WorkerGone."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "firsttoken_extras.worker.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # so that what has not been read shows to who polls
                start_new_session=True,  # a Ctrl-C is the engine's
            )
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{address}\n".encode())
        line = self._line(timeout_s)
        if not line:
            self.close()
            raise WorkerGone(f"no worker was there after {timeout_s:g} s")
        self.worker = int(line)
        return self.worker

    def end(self) -> str:
        """End the worker, and what it has started, and wait until it is gone; how it ended."""
        line, worker, self.worker = self._line(0.0), self.worker, 0
        if not line:
            with suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)  # one that is stopped, too
            line = self._line(10.0) if FORKS else b""
        if line:
            return _ended(os.waitstatus_to_exitcode(int(line)))
        return _ended(self.close())

    def close(self) -> int:
        """End it, with its worker; the status that it ended with."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        process.stdin.close()
        process.stdout.close()
        return process.wait()

    def _line(self, timeout_s: float) -> bytes:
        """What it says next; nothing when it says nothing for so long, or has ended."""
        line, ends_s = b"", time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, ends_s - time.monotonic())):
                    return b""
                if not (byte := self._process.stdout.read(1)):
                    return b""
                line += byte
        return line


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
