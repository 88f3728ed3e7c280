"""A link: the wire that weights come over, real or shaped to a rate.

The bytes of a shaped link come from a real file; only their arrival is held back, by a token bucket. The standard
library only: a worker starts to read before it imports torch.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

from firsttoken.study.errors import LinkError
from firsttoken.study.system.direct_io import read_at

BURST_S = 0.02  # a receive buffer: 2.5 MB at 1 Gbit/s, where Linux lets that of a TCP socket grow to 6 MB
_SLICE_S = 0.002  # readers take turns this often: 244 KiB at 1 Gbit/s
_LEAST_SLICE = 64 << 10  # below it a slow link would spend its time in system calls
_PAGE = 4096  # slices are whole pages, so files opened with O_DIRECT stay aligned


@dataclass(frozen=True)
class LinkConfig:
    """A wire: its rate (0: unshaped, as fast as the file comes) and the wait before the first byte of each file."""

    gbit_per_s: float = 0.0
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        for key in ("gbit_per_s", "latency_ms"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise LinkError(f"link: {key} must be 0 or a positive number, not {getattr(self, key)}")

    @property
    def bytes_per_s(self) -> float:
        return self.gbit_per_s * 1e9 / 8

    @property
    def name(self) -> str:
        """Return the link's name in a table: "unshaped", "1 Gbit/s" or "1 Gbit/s, 5 ms latency"."""
        rate = f"{self.gbit_per_s:g} Gbit/s" if self.gbit_per_s else "unshaped"
        return f"{rate}, {self.latency_ms:g} ms latency" if self.latency_ms else rate


UNSHAPED = LinkConfig()


class Source(Protocol):
    """An open file that is not this machine's."""

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Read from ``offset`` into ``buffer`` and return the number of bytes, perhaps fewer than it holds. Raises
        OSError."""


class TokenBucket:
    """A schedule of when bytes arrive over a wire of ``bytes_per_s``, kept as bookings instead of a count of tokens.

    Bookings follow each other without a gap, so that a reader who wakes late delays no byte behind its own. A wire that
    stood idle makes up for ``burst_s`` of it at most; before the first booking there is nothing to make up for.
    """

    def __init__(self, bytes_per_s: float, burst_s: float = BURST_S) -> None:
        self.bytes_per_s = bytes_per_s
        self.burst_s = burst_s
        self._next_free: float | None = None

    def book(self, count: int, now: float) -> float:
        """The time in s, on the clock of ``now``, at which the next ``count`` bytes have arrived."""
        free = now if self._next_free is None else max(self._next_free, now - self.burst_s)
        self._next_free = free + count / self.bytes_per_s
        return self._next_free


class Link:
    """One wire, shared by all the threads that read through it."""

    def __init__(self, config: LinkConfig = UNSHAPED) -> None:
        self.config = config
        self._bucket = TokenBucket(config.bytes_per_s) if config.gbit_per_s else None
        self._slice = max(_LEAST_SLICE, int(config.bytes_per_s * _SLICE_S) // _PAGE * _PAGE)
        self._lock = threading.Lock()
        self._moved = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that have arrived so far."""
        return self._moved

    def read_into(self, handle: int | Source, buffer: memoryview, offset: int) -> None:
        """Fill all of ``buffer`` (bytes, contiguous) from byte ``offset`` of the open file ``handle``.

        A read at offset 0 is the first of its file and waits for the latency. Raises LinkError when the read fails
        or the file ends early; the buffer is then filled in part.
        """
        if offset == 0 and self.config.latency_ms:
            time.sleep(self.config.latency_ms / 1000)
        done = 0
        while done < len(buffer):
            count, arrives = self._book(len(buffer) - done)
            _read(handle, buffer[done : done + count], offset + done, missing=len(buffer) - done)
            if (wait := arrives - time.monotonic()) > 0:
                time.sleep(wait)
            done += count
            with self._lock:
                self._moved += count

    def _book(self, wanted: int) -> tuple[int, float]:
        """Return the number of bytes to read now, and the time at which they will have arrived."""
        if self._bucket is None:
            return wanted, 0.0
        count = min(wanted, self._slice)
        with self._lock:
            return count, self._bucket.book(count, time.monotonic())


def _read(handle: int | Source, buffer: memoryview, offset: int, missing: int) -> None:
    """Fill ``buffer`` from ``offset``; of the whole read, ``missing`` bytes are not there yet."""
    done = 0
    while done < len(buffer):
        try:
            buffer_rest, file_offset = buffer[done:], offset + done
            got = (
                read_at(handle, buffer_rest, file_offset)
                if isinstance(handle, int)
                else handle.read_at(buffer_rest, file_offset)
            )
        except OSError as error:
            raise LinkError(f"reading at byte {offset + done}: {error.strerror or error}") from error
        if got == 0:
            raise LinkError(f"the file ended {missing - done} bytes early")
        done += got
