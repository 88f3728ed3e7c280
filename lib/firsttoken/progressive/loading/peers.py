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

from firsttoken.assets.checkpoint import weight_files
from firsttoken.assets.empty_model import build_on_meta, put
from firsttoken.assets.model_config import read_config
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.lean.model import LeanModel
from firsttoken.progressive.checkpoint.names import EMBEDDING, HEAD
from firsttoken.progressive.loading.chunked import read_whole
from firsttoken.progressive.loading.placement import Build, build_lean, finish, torch_dtype
from firsttoken.study.errors import ModelError, StageError

if TYPE_CHECKING:  # a lean start needs none of it
    from transformers import PreTrainedModel

Tensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Peer:
    """A way to load, and the package it needs beyond ours."""

    load: Callable[[Path, torch.dtype, torch.device], PreTrainedModel]
    package: str | None = None


def load_with(
    peer: str, folder: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The model in ``folder`` in eval mode, loaded by one of ``PEERS``; without ``dtype``, in the one its config names.

    Raises StageError for an unknown peer or one whose package is not installed, and ModelError for a folder that is not
    whole.
    """
    import_peer(peer)
    weight_files(folder)
    dtype, place = dtype or _stored_dtype(folder), torch.device(device)
    if place.type == "cuda" and place.index is None:  # fastsafetensors takes no other
        place = torch.device("cuda", torch.cuda.current_device())
    return PEERS[peer].load(folder, dtype, place).eval().requires_grad_(False)


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


def _from_pretrained(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    placed = {} if device.type == "cpu" else {"device_map": device}
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, **placed
        )


def _safetensors(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from safetensors.torch import load_file

    files = weight_files(folder)
    return _filled(folder, dtype, device, (item for file in files for item in load_file(file, str(device)).items()))


def _lean(folder: Path, dtype: torch.dtype, device: torch.device) -> LeanModel | PreTrainedModel:
    """Not a peer but what they are measured against: lean layers on the mapped file.

    Frequencies of positions, which old checkpoints hold, are passed over, as transformers does it.
    """
    from safetensors.torch import load_file

    tensors = {name: tensor for file in weight_files(folder) for name, tensor in load_file(file, str(device)).items()}
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    model = _filled(folder, dtype, device, kept.items(), build_lean)
    if model.config.tie_word_embeddings and HEAD in kept and not torch.equal(kept[HEAD], kept[EMBEDDING]):
        raise ModelError(
            f"{folder} has a {HEAD} that is not the embedding it is tied to; set tie_word_embeddings to false in its "
            "config.json"
        )
    return model


def _runai(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from runai_model_streamer import SafetensorsStreamer

    # RUNAI_STREAMER_CONCURRENCY is left alone: since 0.17 it sets the depth of an io_uring queue, 64 on its own, and
    # the number of threads that one would give it (16 is its older default) makes that queue shallower
    with SafetensorsStreamer() as streamer:
        # owned: the tensors are views of buffers that are then not used again, so that none must be cloned; versions
        # before 0.17 do not know the word, and fail here instead of overwriting weights
        streamer.stream_files([str(file) for file in weight_files(folder)], device=str(device), owned=True)
        return _filled(folder, dtype, device, streamer.get_tensors())


def _fastsafetensors(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), str(device), nogds=device.type == "cpu")
    try:
        loader.add_filenames({0: [str(file) for file in weight_files(folder)]})
        buffers = loader.copy_files_to_device()
        try:
            # the tensors share in owning their file's buffer: it stays after `close` for as long as one of them does
            return _filled(folder, dtype, device, ((name, buffers.get_tensor(name)) for name in loader.get_keys()))
        finally:
            buffers.close()
    finally:
        loader.close()


def _chunked(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    def arrived() -> Tensors:
        yield from reading.result().items()

    with ThreadPoolExecutor(1) as beside:  # the model is built meanwhile, as by their `load_model`
        reading = beside.submit(read_whole, weight_files(folder), device)
        return _filled(folder, dtype, device, arrived())


def _filled(
    folder: Path, dtype: torch.dtype, device: torch.device, tensors: Tensors, build: Build = build_on_meta
) -> LeanModel | PreTrainedModel:
    """An empty model with ``tensors`` put into it."""
    model = build(folder, dtype)
    model.model.rotary_emb.to(device)
    for name, tensor in tensors:
        put(model, name, tensor)
    return finish(model)


def _stored_dtype(folder: Path) -> torch.dtype:
    if (name := read_config(folder).stored) is None:
        raise ModelError(f"{folder}/config.json names no dtype; give one")
    return torch_dtype(name)


PEERS = {
    "from_pretrained": Peer(_from_pretrained),
    "safetensors": Peer(_safetensors),
    "runai": Peer(_runai, "runai-model-streamer"),
    "fastsafetensors": Peer(_fastsafetensors, "fastsafetensors"),
    "chunked": Peer(_chunked),
    "lean": Peer(_lean),
}
