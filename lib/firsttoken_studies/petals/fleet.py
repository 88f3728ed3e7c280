"""Two servers or more of each span, in processes that may be broken; the dead are replaced by new ones."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from firsttoken.petals.swarm import Swarm
from firsttoken.study.errors import SwarmError
from firsttoken_studies.record import kernel_forkserver

# A TCP relay to a port of this machine: a link that is slow, reset or silent, where nobody may shape a real one.


class TcpProxy:
    """Passes bytes on in threads, each ``delay_s`` seconds after it came."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._port = 0
        self._open: set[socket.socket] = set()
        self._opening = threading.Lock()  # no connection is made while others are cut: it would outlive them
        self._whole = threading.Event()
        self._flowing = threading.Event()
        self._flowing.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def forward_to(self, port: int) -> None:
        """Lead connections to ``port`` from now on."""
        self._port = port
        self._whole.set()

    def cut(self) -> None:
        """Reset every connection, and refuse new ones until it is healed."""
        with self._opening:
            self._whole.clear()
            cut = list(self._open)
        for connection in cut:
            self._end(connection)

    def hold(self) -> None:
        """Pass nothing on, and give no sign of it."""
        self._flowing.clear()

    def heal(self) -> None:
        """Undo what ``cut`` and ``hold`` did to the link."""
        self._whole.set()
        self._flowing.set()

    def close(self) -> None:
        """End every connection, and listen no more."""
        self.cut()
        self._listening.close()
        self._flowing.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                with self._opening:
                    self._connect(near)

    def _connect(self, near: socket.socket) -> None:
        """Lead ``near`` to the port, or end it where the link is cut or nobody listens."""
        far = None
        if self._whole.is_set():
            with suppress(OSError):
                far = socket.create_connection(("127.0.0.1", self._port))
        if far is None:
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open |= {near, far}
        for end, other in ((near, far), (far, near)):
            self._lead(end, other)

    def _lead(self, source: socket.socket, other: socket.socket) -> None:
        """Pass on all that ``source`` sends to ``other``, after the delay."""
        if not self._delay_s:
            threading.Thread(target=self._pass, args=(source, other), daemon=True).start()
            return
        came: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._hear, args=(source, came), daemon=True).start()
        threading.Thread(target=self._say_late, args=(came, source, other), daemon=True).start()

    def _pass(self, source: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                other.sendall(data)
        self._end(source)
        self._end(other)

    def _hear(self, source: socket.socket, came: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"."
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            came.put((time.monotonic() + self._delay_s, data))

    def _say_late(
        self, came: queue.SimpleQueue[tuple[float, bytes]], target: socket.socket, other: socket.socket
    ) -> None:
        with suppress(OSError):
            while (piece := came.get())[1]:
                time.sleep(max(0.0, piece[0] - time.monotonic()))
                self._flowing.wait()
                other.sendall(piece[1])
        self._end(target)
        self._end(other)

    def _end(self, connection: socket.socket) -> None:
        self._open.discard(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            connection.close()


# Server processes, some behind a relay of this one, for tests and experiments to kill, stop and cut off.

FAULTS = {"kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP)", "cut": "its link reset", "hold": "its link silent"}
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
            kernel_forkserver.command("firsttoken", command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._port = self.pid = 0

    def ready(self) -> Self:
        """Wait until the server serves. Raises SwarmError when it ends instead."""
        if not self.pid:
            line = self._process.stdout.readline()
            match = re.search(r"at (\S+) by process (\d+)(?:, on port (\d+) here)?;", line)
            if not match:
                error_lines = self._process.stderr.read().strip().splitlines() or ["it says nothing"]
                raise SwarmError(f"a server of blocks {self.blocks} did not start: {error_lines[-1]}")
            self.address, self.pid, self._port = match[1], int(match[2]), int(match[3] or 0)
        return self

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGSTOP to the server: its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)

    def heal(self) -> None:
        """Undo the faults that do not end the server."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the server's process, and wait for it."""
        self._process.kill()
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()


class ProxiedServer(ServerProcess):
    """A server behind a relay, whose link takes ``delay_s`` seconds each way."""

    def __init__(self, folder: Path, blocks: str, peers: Sequence[str], delay_s: float = 0.0) -> None:
        self.proxy = TcpProxy(delay_s)
        super().__init__(folder, blocks, peers, self.proxy.address)

    def ready(self) -> Self:
        new = not self.pid
        super().ready()
        if new:
            self.proxy.forward_to(self._port)
        return self

    def cut(self) -> None:
        """Reset the server's link."""
        self.proxy.cut()

    def hold(self) -> None:
        """Silence the server's link, with its connections open."""
        self.proxy.hold()

    def heal(self) -> None:
        self.proxy.heal()
        super().heal()

    def close(self) -> None:
        super().close()
        self.proxy.close()


_TOGETHER_S = 60.0  # within which a swarm has to come together


class Fleet:
    """``spares`` + 1 servers of each of ``spans`` (a:b) of the model in ``folder``, links of ``delay_s`` each way.

    ``door`` is a member to ask for the others, ``members`` are all by the address that others know.
    """

    def __init__(self, folder: Path, spans: Sequence[str], delay_s: float = 0.0, spares: int = 1) -> None:
        self.folder, self.spans, self.spares, self._delay_s = folder, tuple(spans), spares, delay_s
        self.members: dict[str, ProxiedServer] = {}
        try:
            self.door = self.start(self.spans[0]).ready().address
            for blocks in (*self.spans[1:], *self.spans * spares):
                self.start(blocks)
            self.settle()
        except BaseException:
            self.close()  # nobody else knows of those that did start
            raise

    def start(self, blocks: str) -> ProxiedServer:
        """Start one more server, and return it before it is ready."""
        member = ProxiedServer(self.folder, blocks, list(self.members), self._delay_s)
        self.members[member.address] = member
        return member

    def settle(self) -> None:
        """Wait until all members serve."""
        for member in self.members.values():
            member.ready()

    def known_to(self, swarm: Swarm) -> None:
        """Wait until a client knows all servers of each span as ones that answer. Raises SwarmError after a minute."""
        until = time.monotonic() + _TOGETHER_S
        while time.monotonic() < until:
            counts = Counter(record.blocks for record in swarm.servers() if record.address in self.members)
            if len(counts) == len(self.spans) and min(counts.values()) > self.spares:
                return
            time.sleep(0.02)
        raise SwarmError(f"the swarm did not come together: {dict(counts)} of {', '.join(self.spans)}")

    def replace(self, member: ProxiedServer) -> None:
        """Start another server in the place of ``member``, which is dead."""
        del self.members[member.address]
        if member.address == self.door:
            self.door = next(iter(self.members))
        member.close()
        self.start(member.blocks)

    def close(self) -> None:
        for member in self.members.values():
            member.close()
