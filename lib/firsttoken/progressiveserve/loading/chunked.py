"""Reading a whole checkpoint the way ServerlessLLM does: fixed chunks, many readers, past the page cache, one pool.

After Fu et al., "ServerlessLLM: Low-Latency Serverless Inference for Large Language Models", OSDI 2024, section 4
(chunks of a fixed size, direct I/O, pinned memory, one pool, a pipeline from disk to GPU). Not theirs: the files stay
stock safetensors instead of being rewritten for loading, and the pool is allocated by the process that serves instead
of a daemon that outlives it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from firsttoken.assets.checkpoint import check_shard
from firsttoken.progressiveserve.loading.placement import torch_dtype
from firsttoken.progressiveserve.loading.reader import host_memory
from firsttoken.study.errors import LinkError
from firsttoken.study.foreign.tensors import Header
from firsttoken.study.system.reading import open_uncached, read_at

CHUNK_BYTES, THREADS = 32 << 20, 4  # what `sllm-store start`, their own server, takes without options
_PAGE = 4096  # direct I/O wants offsets, lengths and addresses in multiples of the disk's block; none is larger


def read_whole(files: Sequence[Path], device: torch.device, threads: int = THREADS) -> dict[str, Tensor]:
    """Every tensor of the safetensors ``files``, by name, on ``device``; all are views of one pool of bytes.

    With a GPU each chunk is copied there while the next ones are read. Raises ModelError for a file that is not whole,
    and LinkError for one that cannot be read.
    """
    headers = [check_shard(file) for file in files]
    sizes = [file.stat().st_size for file in files]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _PAGE) * _PAGE)
    host = _page_aligned(starts[-1], pinned=device.type == "cuda")
    pool = host if device.type == "cpu" else torch.empty(starts[-1], dtype=torch.uint8, device=device)
    memory = memoryview(host.numpy())

    def bring(handle: int, file: int, offset: int) -> None:
        begin, wanted = starts[file] + offset, min(CHUNK_BYTES, sizes[file] - offset)
        end = begin + -(-wanted // _PAGE) * _PAGE
        _fill(handle, memory[begin:end], offset, wanted, files[file])
        if pool is not host:
            pool[begin:end].copy_(host[begin:end], non_blocking=True)

    with ExitStack() as opened, ThreadPoolExecutor(threads) as readers:
        chunks = []
        for index, file in enumerate(files):
            handle = _open(file)
            opened.callback(os.close, handle)
            chunks += [readers.submit(bring, handle, index, at) for at in range(0, sizes[index], CHUNK_BYTES)]
        for chunk in chunks:
            chunk.result()
    if pool is not host:
        torch.cuda.synchronize(device)  # the pinned memory must outlive the copies from it
    found = zip(headers, starts[:-1], strict=True)
    return {name: tensor for header, start in found for name, tensor in _views(header, pool[start:]).items()}


def _page_aligned(size: int, pinned: bool) -> Tensor:
    if not pinned:
        return torch.frombuffer(host_memory(size), dtype=torch.uint8)
    memory = torch.empty(size + _PAGE, dtype=torch.uint8, pin_memory=True)
    shift = -memory.data_ptr() % _PAGE
    return memory[shift : shift + size]


def _open(file: Path) -> int:
    """``file`` for reading past the page cache, or through it where its file system knows no other way."""
    try:
        handle = open_uncached(file)
        return os.open(file, os.O_RDONLY) if handle is None else handle
    except OSError as error:
        raise LinkError(f"{file}: {error.strerror}") from error


def _fill(handle: int, memory: memoryview, offset: int, wanted: int, file: Path) -> None:
    """``wanted`` bytes from ``offset`` into ``memory``, which is whole pages: a direct read may not ask for less."""
    done = 0
    while done < wanted:
        try:
            got = read_at(handle, memory[done:], offset + done)
        except OSError as error:
            raise LinkError(f"{file}: {error.strerror}") from error
        if got == 0:
            raise LinkError(f"{file} ended {wanted - done} bytes early")
        done += got


def _views(header: Header, pool: Tensor) -> dict[str, Tensor]:
    """The tensors of the safetensors file that lies at the start of ``pool``."""
    tensors = {}
    for name, entry in header.tensors.items():
        dtype, piece = torch_dtype(entry.dtype), pool[entry.start : entry.end]
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()  # a header of odd length is legal, though safetensors itself pads its own to 8
        tensors[name] = piece.view(dtype).view(entry.shape)
    return tensors
