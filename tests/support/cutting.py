"""A TCP relay that a test cuts, holds and heals."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Relay:
    """Passes bytes on to a port of this machine, in threads."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._port = 0
        self._open: set[socket.socket] = set()
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
        self._whole.clear()
        for one in list(self._open):
            self._end(one)

    def hold(self) -> None:
        """Pass nothing on, and tell nobody."""
        self._flowing.clear()

    def heal(self) -> None:
        """As it was."""
        self._whole.set()
        self._flowing.set()

    def close(self) -> None:
        self.cut()
        self._listening.close()
        self._flowing.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if not self._whole.is_set():
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    near.close()
                    continue
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open |= {near, far}
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self._flowing.wait()
                other.sendall(data)
        self._end(one)
        self._end(other)

    def _end(self, one: socket.socket) -> None:
        self._open.discard(one)
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            one.close()
