"""Reading files in parallel, in the order in which they will be needed (standard library only).

A worker starts reading before it imports torch, so nothing here may import it. The files of a list share their
readers chunk by chunk: the first file is whole long before the last one, which is what lets the forward pass begin.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.link.shaped import Link
from firsttoken.study.errors import LinkError, ModelError
from firsttoken.study.system.direct_io import is_cached, open_uncached, read_no_further

if TYPE_CHECKING:
    from firsttoken.progressiveserve.loading.http_reader import RemoteFile, RemotePath

_LEAST_CHUNK = 512 << 10  # below it a fast disk would spend its time in system calls
PAGE = 4096  # direct reads want offsets, lengths and addresses in multiples of the disk's block; none is larger


@dataclass(frozen=True)
class Blob:
    """A file to read: where it lies, how long it must be, and its sha256."""

    path: Path | RemotePath
    label: str  # "layer 07", for messages
    bytes: int
    sha256: str


Allocate = Callable[[int], memoryview]


def host_memory(size: int) -> memoryview:
    """``size`` bytes of fresh memory of this process alone, page-aligned."""
    return memoryview(mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class BlobReader:
    """Reads ``blobs`` with ``threads`` readers for each of ``links``.

    With several links each takes a contiguous group of about equal bytes, as ParaServe's workers do. ``verify``
    compares sha256 sums, in the reader that brought the last chunk, while the others go on.

    All files are opened before the first reader runs: whoever waits keeps the interpreter busy (tokenizer, empty
    model), and each system call of a reader may then cost it one turn of 5 ms. Opened by the readers, 269 MB in 32
    files took 0.52 s instead of 0.45 s (medians of 20, two busy cores).

    Chunks of all readers come at the same time over a slow link. So they get shorter towards the end, and at most half
    of what is left is on its way at once (of less than 8 MB, all): the last files are whole one after the other, and
    whoever computes with them has little left to do when the last one is. (135 M weights over 1 Gbit/s: the last six
    layers after 1.92, 1.97, 2.01, 2.07, 2.12 and 2.16 s; with chunks of a fixed length five of them after 2.16. From a
    disk all come in 0.24 s either way, medians of 6.)
    """

    def __init__(
        self,
        blobs: Sequence[Blob],
        links: Sequence[Link],
        *,
        threads: int = 8,
        chunk_bytes: int = 8 << 20,
        verify: bool = True,
        allocate: Allocate = host_memory,
    ) -> None:
        self.blobs = list(blobs)
        self._verify, self._allocate = verify, allocate
        self._lock = threading.Lock()  # of what is counted; never held while a reader waits for memory
        self._buffers: dict[int, memoryview] = {}
        self._remaining = [0] * len(self.blobs)  # chunks that have not come
        self._done = [threading.Event() for _ in self.blobs]
        self._files: list[_OpenFile | RemoteFile] = []
        self._error: Exception | None = None
        self._stop = False
        self._threads = []
        groups = even_groups([blob.bytes for blob in self.blobs], len(links))
        for link, group in zip(links, groups, strict=True):
            chunks = list(self._chunks(group, chunk_bytes, threads))
            for index, _, _ in chunks:
                self._remaining[index] += 1
            turn = link, iter(chunks), threading.Lock()
            self._threads += [
                threading.Thread(target=self._work, args=turn, name=f"reader-{i}", daemon=True) for i in range(threads)
            ]

    def start(self) -> None:
        """Open the files and start the threads that read them."""
        for blob in self.blobs:
            try:
                self._files.append(_opened(blob))
            except Exception as error:
                self._fail(error, blob)
                return
        for thread in self._threads:
            thread.start()

    def wait(self, index: int) -> memoryview:
        """The bytes of blob ``index``, in memory of its own.

        Raises LinkError when the transfer broke off and ModelError for a file that is missing, of another length, or
        (with ``verify``) of another sha256.
        """
        self._done[index].wait()
        if index not in self._buffers or self._remaining[index]:
            raise self._error or LinkError(f"reading of {self.blobs[index].label} was stopped")
        return self._buffers.pop(index)[: self.blobs[index].bytes]

    def close(self) -> None:
        """Stop reading and wait for the readers to end."""
        self._stop = True
        for thread in self._threads:
            if thread.ident:
                thread.join()
        while self._files:
            self._files.pop().close()
        self._wake_all()

    def _chunks(self, group: range, chunk_bytes: int, threads: int) -> Iterator[tuple[int, int, int]]:
        """Yield (blob, offset, bytes), first to last."""
        remaining = sum(self.blobs[index].bytes for index in group)
        for index in group:
            size, offset = self.blobs[index].bytes, 0
            while not offset or offset < size:
                share = max(_LEAST_CHUNK, remaining // (2 * threads) // PAGE * PAGE)
                count = min(chunk_bytes, share, size - offset)
                yield index, offset, count
                offset, remaining = offset + max(1, count), remaining - count

    def _work(self, link: Link, chunks: Iterator[tuple[int, int, int]], turn: threading.Lock) -> None:
        try:
            while not self._stop:
                with turn:
                    chunk = next(chunks, None)
                    if chunk is None:
                        return
                    index, offset, size = chunk
                    if index not in self._buffers:
                        self._buffers[index] = self._allocate(self.blobs[index].bytes)
                    target = self._buffers[index][offset : offset + size]
                self._files[index].read_into(link, target, offset)
                self._chunk_done(index)
        except Exception as error:
            self._fail(error, self.blobs[index])

    def _chunk_done(self, index: int) -> None:
        with self._lock:
            last = self._remaining[index] == 1
            # The last chunk leaves the count at 1 until the sum has been checked: a failure elsewhere wakes ``wait``,
            # which takes a file of which nothing is left for a good one.
            self._remaining[index] -= 0 if last else 1
        if not last:
            return
        blob = self.blobs[index]
        if self._verify:
            content = self._buffers[index][: blob.bytes]
            if hashlib.sha256(content).hexdigest() != blob.sha256:
                raise ModelError(f"{blob.label}: {blob.path.name} has a wrong sha256; copy it again")
        self._remaining[index] = 0
        self._done[index].set()

    def _fail(self, error: Exception, blob: Blob) -> None:
        if not isinstance(error, ModelError):
            reason = error.strerror if isinstance(error, OSError) else error
            error = LinkError(f"{blob.label}: {blob.path.name} cannot be read: {reason}")
        self._error = self._error or error
        self._stop = True
        self._wake_all()

    def _wake_all(self) -> None:
        for event in self._done:
            event.set()


def even_groups(sizes: Sequence[int], count: int) -> list[range]:
    """``count`` contiguous groups of about equal sums: each cut is the one nearest to where it should be."""
    before = [0, *accumulate(sizes)]
    cuts = [min(range(len(before)), key=lambda i: abs(before[i] - before[-1] * k / count)) for k in range(1, count)]
    return [range(low, high) for low, high in pairwise([0, *cuts, len(sizes)])]


class _OpenFile:
    """An open file: read from the page cache where it lies there, else past it.

    A direct read spares the kernel's copy, which on two cores is computing time that the tokenizer and the empty model
    want at that moment: 0.13 instead of 0.20 CPU seconds for 269 MB.
    """

    def __init__(self, path: Path) -> None:
        self._buffered = os.open(path, os.O_RDONLY)
        # where the system does not tell, the page cache may hold it: a direct read would bring it from the disk again
        self._direct = open_uncached(path) if is_cached(self._buffered) is False else None
        if self._direct is not None:
            read_no_further(self._buffered)  # what is left for it is the end of the file

    def read_into(self, link: Link, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``, which is a multiple of a page. Raises LinkError."""
        aligned = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE == 0 if buffer else False
        direct_bytes = len(buffer) // PAGE * PAGE if aligned and self._direct is not None else 0
        if direct_bytes:
            try:
                link.read_into(self._direct, buffer[:direct_bytes], offset)
            except LinkError:  # a disk that takes no such length, after all; what is truly wrong comes again below
                direct_bytes = 0
        if direct_bytes < len(buffer):
            link.read_into(self._buffered, buffer[direct_bytes:], offset + direct_bytes)

    def close(self) -> None:
        for handle in (self._buffered, self._direct):
            if handle is not None:
                os.close(handle)


def _opened(blob: Blob) -> _OpenFile | RemoteFile:
    if not isinstance(blob.path, Path):
        return blob.path.open(blob.bytes)
    try:
        size = blob.path.stat().st_size
    except OSError:
        raise ModelError(f"{blob.label}: {blob.path.name} is missing in {blob.path.parent}; copy it there") from None
    if size != blob.bytes:
        raise ModelError(f"{blob.label}: {blob.path.name} has {size:,} of {blob.bytes:,} bytes; copy it again")
    return _OpenFile(blob.path)
