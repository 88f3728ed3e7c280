"""Other people's ways to load a whole model, each as its authors mean it: what the staged loader is measured against.

Every one takes a stock folder (config.json and safetensors, sharded or not) to a model whose answers are equal. None
lets a prefill begin before it returns, but on a CPU ``safetensors`` and ``from_pretrained`` return before they have
read: they map the files, and the first forward pass pays for every page. (Both copy where ``dtype`` is not the stored
one.) ``runai``, ``fastsafetensors`` and ``chunked`` read past the page cache where the file system lets them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from firsttoken.assets.checkpoint import ModelFiles, stored_dtype
from firsttoken.assets.empty_model import build_on_meta, put
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.assets.servable import check_servable
from firsttoken.assets.weights import check_tied, tensors_of
from firsttoken.lean.model import LeanModel
from firsttoken.progressiveserve.loading.chunked import read_whole
from firsttoken.progressiveserve.loading.placement import build_lean, finish, torch_dtype
from firsttoken.study.errors import StageError

if TYPE_CHECKING:  # a lean start needs none of it
    from transformers import PreTrainedModel

Tensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Peer:
    """A way to load, and the package it needs beyond ours."""

    load: Callable[[ModelFiles, torch.dtype, torch.device], PreTrainedModel]
    package: str | None = None


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
    dtype, place = dtype or torch_dtype(stored_dtype(folder)), torch.device(device)
    if place.type == "cuda" and place.index is None:  # fastsafetensors takes no other
        place = torch.device("cuda", torch.cuda.current_device())
    return PEERS[peer].load(files, dtype, place).eval().requires_grad_(False)


def import_peer(peer: str) -> None:
    """Import what ``peer`` needs, as a worker does before a request comes. Raises StageError as :func:`load_with`."""
    if peer not in PEERS:
        raise StageError(f"no peer is called {peer!r}; known: {', '.join(PEERS)}")
    package = PEERS[peer].package
    module = package.replace("-", "_") if package else ""
    try:
        if module:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise StageError(f"peer {peer} needs the package {package}: pip install 'firsttoken[peers]'") from error


def installed(peer: str) -> bool:
    """Whether the package of ``peer`` can be imported here."""
    package = PEERS[peer].package
    return package is None or importlib.util.find_spec(package.replace("-", "_")) is not None


def _from_pretrained(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """It chooses among the files of a folder itself, and of one that can be served it has no other choice."""
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


def _lean(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> LeanModel | PreTrainedModel:
    """Not a peer but what they are measured against: lean layers on the mapped file."""
    model = build_lean(files.folder, dtype)
    model.model.rotary_emb.to(device)
    for name, tensor in tensors_of(files, device=device):
        put(model, name, tensor)
    return finish(model)


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

    loader = SafeTensorsFileLoader(SingleGroup(), str(device), nogds=device.type == "cpu")
    try:
        loader.add_filenames({0: [str(file) for file in files.files]})
        buffers = loader.copy_files_to_device()
        try:
            # the tensors share in owning their file's buffer: it stays after `close` for as long as one of them does
            return _filled(files, dtype, device, ((name, buffers.get_tensor(name)) for name in loader.get_keys()))
        finally:
            buffers.close()
    finally:
        loader.close()


def _chunked(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    def arrived() -> Tensors:
        yield from reading.result().items()

    with ThreadPoolExecutor(1) as beside:  # the model is built meanwhile, as by their `load_model`
        reading = beside.submit(read_whole, files.files, device)
        return _filled(files, dtype, device, arrived())


def _filled(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, stored: Tensors
) -> LeanModel | PreTrainedModel:
    """An empty model with what the files hold put into it, where it has a place."""
    model = build_on_meta(files.folder, dtype)
    model.model.rotary_emb.to(device)
    for called, tensor in stored:
        if (name := files.place(called)) is not None:
            put(model, name, tensor)
    return finish(model)


PEERS = {
    "from_pretrained": Peer(_from_pretrained),
    "safetensors": Peer(_safetensors),
    "runai": Peer(_runai, "runai-model-streamer"),
    "fastsafetensors": Peer(_fastsafetensors, "fastsafetensors"),
    "chunked": Peer(_chunked),
    "lean": Peer(_lean),
}
