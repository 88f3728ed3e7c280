"""Parts of a checkpoint folder: a span of its blocks for a server, its ends for a client, and what both call the model.

The folder is a plain Hugging Face one, its safetensors in one file or in shards, a staged checkpoint, or one whose
blocks rest in 8 bits (``int8_checkpoint``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from firsttoken.assets.checkpoint import CODES, combined_sha256
from firsttoken.assets.empty_model import build_on_meta, put
from firsttoken.assets.model_config import CONFIG, read_config
from firsttoken.assets.servable import check_servable
from firsttoken.assets.weights import tensors_of
from firsttoken.petals.int8_checkpoint import SCALES, put_8_bits
from firsttoken.study.errors import ModelError, SwarmError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")


def model_sha256(folder: Path) -> str:
    """What servers and clients of one model agree on: a sha256 over config.json and all weight files, read once.

    Raises ModelError for a folder that cannot be served.
    """
    return combined_sha256([*check_servable(folder, in_8_bits=True).files, folder / CONFIG])


def parse_blocks(text: str, depth: int) -> range:
    """ "a:b" as blocks [a, b) of a model of ``depth``. Raises SwarmError for anything else."""
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    if not found or not int(found[1]) < int(found[2]) <= depth:
        raise SwarmError(f"blocks {text!r} are not a:b with 0 <= a < b <= {depth}, the model's depth")
    return range(int(found[1]), int(found[2]))


def depth_of(folder: Path) -> int:
    """Blocks of the model in ``folder``. Raises ModelError for a folder without a usable config.json."""
    return read_config(folder).num_hidden_layers


def load_span(folder: Path, blocks: range, dtype: torch.dtype) -> PreTrainedModel:
    """The model with ``blocks`` only, numbered from 0, in ``dtype``; its ends stay without memory.

    Only the bytes of these blocks are read. Raises ModelError for a folder that cannot be served.
    """
    model = build_on_meta(folder, dtype, blocks)

    def place(name: str) -> str | None:
        found = _LAYER.fullmatch(name)
        if not found or int(found[1]) not in blocks:
            return None
        return f"model.layers.{int(found[1]) - blocks.start}.{found[2]}"

    _fill(model, folder, place)
    return _checked(model, folder, lambda name: _LAYER.fullmatch(name) is not None)


def load_ends(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with embedding, norm and head in ``dtype``; its blocks stay without memory. Raises as ``load_span``."""
    model = build_on_meta(folder, dtype)
    known = dict(model.named_parameters())
    _fill(model, folder, lambda name: name if name in known and not _LAYER.fullmatch(name) else None)
    model.tie_weights()
    return _checked(model, folder, lambda name: _LAYER.fullmatch(name) is None)


def _fill(model: PreTrainedModel, folder: Path, place: Callable[[str], str | None]) -> None:
    in_8_bits: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(folder, place):
        path, _, leaf = name.rpartition(".")
        if leaf in (CODES, SCALES):
            in_8_bits.setdefault(path, {})[leaf] = tensor
        else:
            put(model, name, tensor)
    for path, parts in in_8_bits.items():
        put_8_bits(model, path, parts)


def _tensors(folder: Path, place: Callable[[str], str | None]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that ``place`` gives a name in the model, under this name."""
    files = check_servable(folder, in_8_bits=True)
    for stored, tensor in tensors_of(files, lambda name: place(name) is not None):
        yield place(stored), tensor.clone()  # a slice of the mapped file would keep all of it


def _checked(model: PreTrainedModel, folder: Path, wanted: Callable[[str], bool]) -> PreTrainedModel:
    missing = [name for name, one in model.named_parameters() if one.is_meta and wanted(name)]
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} tensors, first {missing[0]}; copy the whole checkpoint")
    return model
