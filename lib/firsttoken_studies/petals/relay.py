"""A TCP relay to a port of this machine: a link that is slow, reset or silent, where nobody may shape a real one."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress


class Relay:
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

    def lead_to(self, port: int) -> None:
        """From now on."""
        self._port = port
        self._whole.set()

    def cut(self) -> None:
        """Reset every connection, and refuse new ones until it is healed."""
        with self._opening:
            self._whole.clear()
            cut = list(self._open)
        for one in cut:
            self._end(one)

    def hold(self) -> None:
        """Pass nothing on, and tell nobody."""
        self._flowing.clear()

    def heal(self) -> None:
        """As it was."""
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
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open |= {near, far}
        for one, other in ((near, far), (far, near)):
            self._lead(one, other)

    def _lead(self, one: socket.socket, other: socket.socket) -> None:
        """What ``one`` says, to ``other``."""
        if not self._delay_s:
            threading.Thread(target=self._pass, args=(one, other), daemon=True).start()
            return
        came: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._hear, args=(one, came), daemon=True).start()
        threading.Thread(target=self._say_late, args=(came, one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self._flowing.wait()
                other.sendall(data)
        self._end(one)
        self._end(other)

    def _hear(self, one: socket.socket, came: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"."
        while data:
            try:
                data = one.recv(1 << 16)
            except OSError:
                data = b""
            came.put((time.monotonic() + self._delay_s, data))

    def _say_late(self, came: queue.SimpleQueue[tuple[float, bytes]], one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while (said := came.get())[1]:
                time.sleep(max(0.0, said[0] - time.monotonic()))
                self._flowing.wait()
                other.sendall(said[1])
        self._end(one)
        self._end(other)

    def _end(self, one: socket.socket) -> None:
        self._open.discard(one)
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            one.close()
