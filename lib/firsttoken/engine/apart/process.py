"""A worker process: started, told and heard, noticed when it dies or says nothing, and ended with all that it began."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import zmq

from firsttoken.engine.apart.wire import MOST_BYTES


class WorkerGone(Exception):
    """It died, or said nothing for as long as it may."""


class WorkerProcess:
    """One process, and the only way to it: a socket of an unguessable name in a folder that only this user may enter.

    It ends when this process does, however that ends: its standard input then is at its end. ``pid`` is its own.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="firsttoken-"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        address = f"ipc://{self._folder}/{secrets.token_hex(8)}"
        self._socket.bind(address)
        self._ending, held = os.pipe()  # the worker holds the other end and never writes, so this one ends as it does
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "firsttoken.engine.apart.worker", address],
                stdin=subprocess.PIPE,
                pass_fds=[held],
                start_new_session=True,  # a Ctrl-C is the engine's; and what the worker starts can be ended with it
            )
        finally:
            os.close(held)
        self.pid = self._process.pid
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._ending, zmq.POLLIN)

    def send(self, data: bytes) -> None:
        """Never waits; a message to one that is gone is lost."""
        with suppress(zmq.Again):
            self._socket.send(data, zmq.DONTWAIT)

    def receive(self, timeout_s: float) -> bytes:
        """The next message. Raises WorkerGone when none will come, or has come for ``timeout_s``."""
        ready = dict(self._poller.poll(1000 * timeout_s))
        if self._socket in ready:
            return self._socket.recv()
        if not ready:
            raise WorkerGone(f"the worker has said nothing for {timeout_s:g} s")
        raise WorkerGone(f"the worker {_ended(self._process.wait())}")

    def close(self) -> None:
        """End it, whatever it is about, and wait until it and its socket are gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # one that is stopped, too
        self._process.wait()
        self._process.stdin.close()
        os.close(self._ending)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
