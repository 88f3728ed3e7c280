"""A TCP relay with a round trip and a rate, as a process of its own: what a network between two machines would add.

    python -m firsttoken_studies.combined.borrowed.relay PORT --rtt-ms 5 --gbit-per-s 1

leads to PORT of this machine and prints its own address as one line. Each way has a link of that rate, which all
connections share, and half of the round trip; a rate or a round trip of 0 adds nothing of its own. The standard
library only.
"""

from __future__ import annotations

import argparse
import queue
import socket
import threading
import time
from contextlib import suppress

from firsttoken.link.shaped import TokenBucket

_PIECE = 16 << 10  # 0.13 ms at 1 Gbit/s
_WAITING = 1024  # pieces on their way at most: 16 MiB


class ShapedDirection:
    """One direction: bytes leave it at ``gbit_per_s`` (0: at once), ``delay_s`` after they have come."""

    def __init__(self, gbit_per_s: float, delay_s: float) -> None:
        self._delay_s = delay_s
        self._bucket = TokenBucket(gbit_per_s * 1e9 / 8, burst_s=0.0) if gbit_per_s else None
        self._lock = threading.Lock()

    def carry(self, source: socket.socket, other: socket.socket) -> None:
        """Pass on all that comes from ``source`` to ``other``, until either ends; then end both."""
        on_the_way: queue.Queue[tuple[float, bytes]] = queue.Queue(_WAITING)
        threading.Thread(target=_deliver, args=(on_the_way, source, other), daemon=True).start()
        with suppress(OSError):
            while data := source.recv(_PIECE):
                on_the_way.put((self._arrives(len(data)), data))
        on_the_way.put((0.0, b""))

    def _arrives(self, count: int) -> float:
        now = time.monotonic()
        if self._bucket is None:
            return now + self._delay_s
        with self._lock:
            return self._bucket.book(count, now) + self._delay_s


def _deliver(on_the_way: queue.Queue[tuple[float, bytes]], source: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while (piece := on_the_way.get())[1]:
            if (wait_s := piece[0] - time.monotonic()) > 0:
                time.sleep(wait_s)
            other.sendall(piece[1])
    for end in (source, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def lead(listening: socket.socket, port: int, ways: tuple[ShapedDirection, ShapedDirection]) -> None:
    """Pass every connection on to ``port``, through the first of ``ways`` and back through the second."""
    while True:
        near, _ = listening.accept()
        try:
            far = socket.create_connection(("127.0.0.1", port))
        except OSError:
            near.close()
            continue
        for source, other, way in ((near, far, ways[0]), (far, near, ways[1])):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=way.carry, args=(source, other), daemon=True).start()


def main() -> None:
    """Run the relay as a command."""
    parser = argparse.ArgumentParser(prog="python -m firsttoken_studies.combined.borrowed.relay", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--rtt-ms", type=float, default=0.0)
    parser.add_argument("--gbit-per-s", type=float, default=0.0)
    options = parser.parse_args()
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"127.0.0.1:{listening.getsockname()[1]}", flush=True)
    ways = tuple(ShapedDirection(options.gbit_per_s, options.rtt_ms / 2000) for _ in range(2))
    with suppress(KeyboardInterrupt):
        lead(listening, options.port, ways)


if __name__ == "__main__":
    main()
