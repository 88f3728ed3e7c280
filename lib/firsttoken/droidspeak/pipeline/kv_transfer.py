"""Pieces of a stored cache, brought over a link in a given order by one background thread."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from firsttoken.droidspeak.tensor_bytes import CachePiece, bytes_of, check_numbers
from firsttoken.link.shaped import Link
from firsttoken.study.errors import CacheError, LinkError, RequestError

_CHUNK = 4 << 20  # bytes between two looks at whether the transfer was cancelled
_LEAST_CHUNK = 64 << 10
_CHUNK_S = 0.02  # on a slow link a chunk is what arrives within this time


class Buffers:
    """Memory on ``device`` for ``pieces``; for a GPU each of them passes through page-locked memory of its size.

    Making them costs time, and so does the first touch of fresh memory: who serves, or measures, keeps them and lets
    one transfer go before the one that counts. A second transfer overwrites what the first brought.
    """

    def __init__(self, pieces: Iterable[CachePiece], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.host = {p.name: torch.empty(p.shape, dtype=p.dtype, pin_memory=on_gpu) for p in pieces}
        self.on_device = (
            {name: torch.empty_like(host, device=self.device) for name, host in self.host.items()}
            if on_gpu
            else self.host
        )


class Transfer:
    """Brings ``pieces`` over ``link`` into ``buffers``, in their order, while its ``with`` block runs.

    The wait before a file's first byte, the link's latency, is paid once for each file. On a GPU a piece goes on to the
    device on a stream of its own, beside the computation. The thread ends with the block, whatever happened; what had
    not arrived by then does not arrive.
    """

    def __init__(self, pieces: Sequence[CachePiece], link: Link, buffers: Buffers) -> None:
        lacking = [p.name for p in pieces if p.name not in buffers.host or buffers.host[p.name].shape != p.shape]
        if lacking:
            raise RequestError(f"no buffer of its shape for {', '.join(lacking)}; make Buffers from the same pieces")
        self.pieces, self._link, self._buffers = tuple(pieces), link, buffers
        self._arrivals: dict[str, Future[float]] = {piece.name: Future() for piece in pieces}
        self._copied: dict[str, torch.cuda.Event] = {}
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._receive_all, name="kv-transfer", daemon=True)
        self._side = torch.cuda.Stream(buffers.device) if buffers.device.type == "cuda" else None
        self.bytes_moved = 0

    def __enter__(self) -> Transfer:
        if self._side is not None:  # kernels queued before may still use the memory that the buffers got
            self._side.wait_stream(torch.cuda.current_stream(self._buffers.device))
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._cancelled.set()
        self._thread.join()
        if self._side is not None:
            self._side.synchronize()

    def wait(self, name: str) -> Tensor:
        """The piece ``name``, once it is there; on a GPU, for what the current stream does from now on.

        Raises LinkError when the transfer broke off before it arrived, from a CacheError where the file is at fault:
        it was cut, or holds other bytes than were stored or no numbers that a layer computes with.
        """
        try:
            self._arrivals[name].result()
        except Exception as error:
            raise LinkError(f"{name} did not arrive: {error}") from error
        if self._side is not None:
            torch.cuda.current_stream(self._buffers.device).wait_event(self._copied[name])
        return self._buffers.on_device[name]

    def ready(self, name: str) -> Tensor | None:
        """Return what ``wait`` returns, but None where it would wait."""
        return self.wait(name) if self._arrivals[name].done() else None

    def arrival_s(self, name: str) -> float:
        """Return the time, on ``time.perf_counter``, at which the last byte of a piece that has been waited for
        arrived."""
        return self._arrivals[name].result()

    @torch.inference_mode()  # thread-local, and the buffers may have been made under it
    def _receive_all(self) -> None:
        opened: dict[Path, int] = {}
        try:
            with ExitStack() as files:
                for piece in self.pieces:
                    if piece.path not in opened:
                        opened[piece.path] = self._open(piece, files)
                    self._receive(piece, opened[piece.path])
        except Exception as error:  # whatever it is, the thread that waits must not wait for ever
            for arrival in self._arrivals.values():
                if not arrival.done():
                    arrival.set_exception(error)

    def _open(self, piece: CachePiece, files: ExitStack) -> int:
        try:
            handle = os.open(piece.path, os.O_RDONLY)
        except OSError as error:
            raise LinkError(f"{piece.path}: {error.strerror}") from error
        files.callback(os.close, handle)
        end = max(other.offset + other.nbytes for other in self.pieces if other.path == piece.path)
        if (missing := end - os.fstat(handle).st_size) > 0:
            raise CacheError(f"the file ended {missing} bytes early")
        if piece.offset:  # at offset 0 the link itself waits
            self._cancelled.wait(self._link.config.latency_ms / 1000)
        return handle

    def _receive(self, piece: CachePiece, handle: int) -> None:
        host = self._buffers.host[piece.name]
        view, digest = bytes_of(host), hashlib.sha256()
        rate = self._link.config.bytes_per_s
        chunk = min(_CHUNK, max(_LEAST_CHUNK, int(rate * _CHUNK_S))) if rate else _CHUNK
        for start in range(0, piece.nbytes, chunk):
            if self._cancelled.is_set():
                raise LinkError("the transfer was cancelled")
            part = view[start : start + chunk]
            self._link.read_into(handle, part, piece.offset + start)
            self.bytes_moved += len(part)
            digest.update(part)
        if digest.hexdigest() != piece.sha256:
            raise CacheError("its sha256 is not that of what was stored")
        check_numbers(host)
        if self._side is not None:
            with torch.cuda.stream(self._side):
                self._buffers.on_device[piece.name].copy_(host, non_blocking=True)
                self._copied[piece.name] = self._side.record_event()
        self._arrivals[piece.name].set_result(time.perf_counter())
