"""Other people's ways to load a whole model, each as its authors mean it: what the staged loader is measured against.

Every one takes a stock folder (config.json and safetensors, sharded or not) to a model whose answers are equal. None
lets a prefill begin before it returns, but on a CPU ``safetensors`` and ``from_pretrained`` return before they have
read: they map the files, and the first forward pass pays for every page. (Both copy where ``dtype`` is not the stored
one.) ``runai``, ``fastsafetensors`` and ``chunked`` read past the page cache where the file system lets them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from firsttoken.assets.checkpoint import ModelFiles, check_shard, stored_dtype
from firsttoken.assets.empty_model import build_on_meta, set_parameter, tie_head
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.assets.servable import check_servable
from firsttoken.assets.weights import check_tied, fill
from firsttoken.engine.accelerator import build_model
from firsttoken.progressiveserve.checkpoint.names import torch_dtype
from firsttoken.progressiveserve.loading.reader import PAGE, host_memory
from firsttoken.study.errors import LinkError, StageError
from firsttoken.study.parsing.safetensors_header import Header
from firsttoken.study.system.direct_io import open_uncached, read_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Reading a whole checkpoint the way ServerlessLLM does: fixed chunks, many readers, past the page cache, one pool.
#
# After Fu et al., "ServerlessLLM: Low-Latency Serverless Inference for Large Language Models", OSDI 2024, section 4
# (chunks of a fixed size, direct I/O, pinned memory, one pool, a pipeline from disk to GPU). Not theirs: the files stay
# stock safetensors instead of being rewritten for loading, and the pool is allocated by the process that serves instead
# of a daemon that outlives it.

CHUNK_BYTES, THREADS = 32 << 20, 4  # what `sllm-store start`, their own server, takes without options


def read_whole(files: Sequence[Path], device: torch.device, threads: int = THREADS) -> dict[str, Tensor]:
    """Every tensor of the safetensors ``files``, by name, on ``device``; all are views of one pool of bytes.

    With a GPU each chunk is copied there while the next ones are read. Raises ModelError for a file that is not whole,
    and LinkError for one that cannot be read.
    """
    headers = [check_shard(file) for file in files]
    sizes = [file.stat().st_size for file in files]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // PAGE) * PAGE)
    host = _page_aligned(starts[-1], pinned=device.type == "cuda")
    pool = host if device.type == "cpu" else torch.empty(starts[-1], dtype=torch.uint8, device=device)
    memory = memoryview(host.numpy())

    def bring(handle: int, file: int, offset: int) -> None:
        begin, wanted = starts[file] + offset, min(CHUNK_BYTES, sizes[file] - offset)
        end = begin + -(-wanted // PAGE) * PAGE
        _fill(handle, memory[begin:end], offset, wanted, files[file])
        if pool is not host:
            pool[begin:end].copy_(host[begin:end], non_blocking=True)

    with ExitStack() as opened, ThreadPoolExecutor(threads) as readers:
        chunks = []
        for index, file in enumerate(files):
            handle = _open(file)
            opened.callback(os.close, handle)
            chunks += [
                readers.submit(bring, handle, index, chunk_start) for chunk_start in range(0, sizes[index], CHUNK_BYTES)
            ]
        for chunk in chunks:
            chunk.result()
    if pool is not host:
        torch.cuda.synchronize(device)  # the pinned memory must outlive the copies from it
    tables = zip(headers, starts[:-1], strict=True)
    return {name: tensor for header, start in tables for name, tensor in _views(header, pool[start:]).items()}


def _page_aligned(size: int, pinned: bool) -> Tensor:
    if not pinned:
        return torch.frombuffer(host_memory(size), dtype=torch.uint8)
    memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=True)
    shift = -memory.data_ptr() % PAGE
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


Tensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Peer:
    """A way to load, and what it imports of a package that it needs beyond ours."""

    load: Callable[[ModelFiles, torch.dtype, torch.device], nn.Module]
    module: str | None = None


def load_with(
    peer: str, folder: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The model in ``folder`` in eval mode, loaded by one of ``PEERS``; without ``dtype``, in the one that it is
    stored in.

    Raises StageError for an unknown peer or one whose package is not installed, and ModelError for a folder that cannot
    be served.
    """
    import_peer(peer)
    files = check_servable(folder)
    check_tied(files)
    dtype, target_device = dtype or torch_dtype(stored_dtype(folder)), torch.device(device)
    if target_device.type == "cuda" and target_device.index is None:  # fastsafetensors takes no other
        target_device = torch.device("cuda", torch.cuda.current_device())
    return PEERS[peer].load(files, dtype, target_device).eval().requires_grad_(False)


def import_peer(peer: str) -> None:
    """Import what ``peer`` needs, as a worker does before a request comes. Raises StageError as :func:`load_with`."""
    if peer not in PEERS:
        raise StageError(f"no peer is called {peer!r}; known: {', '.join(PEERS)}")
    module = PEERS[peer].module
    if not installed(peer):
        mend = 'pip install -e ".[peers]" in the clone'
        raise StageError(f"peer {peer} needs the package {module.replace('_', '-')}: {mend}")
    if module:
        importlib.import_module(module)


def installed(peer: str) -> bool:
    """Return whether the package of ``peer`` can be imported here."""
    module = PEERS[peer].module
    return module is None or importlib.util.find_spec(module) is not None


def _from_pretrained(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load ``files`` by ``from_pretrained``, which chooses among the files of a folder itself; of one that can be
    served it has no other choice."""
    from transformers import AutoModelForCausalLM

    placed = {} if device.type == "cpu" else {"device_map": device}
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(
            files.folder, dtype=dtype, use_safetensors=True, local_files_only=True, **placed
        )


def _safetensors(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from safetensors.torch import load_file

    return _filled(
        files, dtype, device, (item for file in files.files for item in load_file(file, str(device)).items())
    )


def _runai(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from runai_model_streamer import SafetensorsStreamer

    # RUNAI_STREAMER_CONCURRENCY is left alone: since 0.17 it sets the depth of an io_uring queue, 64 on its own, and
    # the number of threads that one would give it (16 is its older default) makes that queue shallower
    with SafetensorsStreamer() as streamer:
        # owned: the tensors are views of buffers that are then not used again, so that none must be cloned; versions
        # before 0.17 do not know the word, and fail here instead of overwriting weights
        streamer.stream_files([str(file) for file in files.files], device=str(device), owned=True)
        return _filled(files, dtype, device, streamer.get_tensors())


def _fastsafetensors(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    with closing(SafeTensorsFileLoader(SingleGroup(), str(device), nogds=device.type == "cpu")) as loader:
        loader.add_filenames({0: [str(file) for file in files.files]})
        with closing(loader.copy_files_to_device()) as buffers:
            # the tensors share in owning their file's buffer: it stays after `close` for as long as one of them does
            return _filled(files, dtype, device, ((name, buffers.get_tensor(name)) for name in loader.get_keys()))


def _chunked(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    def arrived() -> Tensors:
        yield from reading.result().items()

    with ThreadPoolExecutor(1) as beside:  # the model is built meanwhile, as by their `load_model`
        reading = beside.submit(read_whole, files.files, device)
        return _filled(files, dtype, device, arrived())


def _lean(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return fill(build_model(files.folder, dtype), files, device)


def _filled(files: ModelFiles, dtype: torch.dtype, device: torch.device, stored: Tensors) -> nn.Module:
    """An empty model with what the files hold put into it, where it has a place."""
    model = build_on_meta(files.folder, dtype)
    model.model.rotary_emb.to(device)
    for called, tensor in stored:
        if (name := files.place(called)) is not None:
            set_parameter(model, name, tensor)
    return tie_head(model)


PEERS = {
    "from_pretrained": Peer(_from_pretrained),
    "safetensors": Peer(_safetensors),
    "runai": Peer(_runai, "runai_model_streamer"),
    "fastsafetensors": Peer(_fastsafetensors, "fastsafetensors"),
    "chunked": Peer(_chunked),
    "lean": Peer(_lean),  # not a peer but what they are measured against: lean layers on the mapped file
}
