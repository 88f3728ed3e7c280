"""Parts of a checkpoint folder: a span of its blocks for a server, its ends for a client, and what both call the model.

The folder is a plain Hugging Face one, its safetensors in one file or in shards, a staged checkpoint, or one whose
blocks rest in 8 bits: half the bytes on disk and in memory. Beside each tensor that stays as it is, such a folder holds
of a linear layer ``codes`` (int8 [out, in]) and ``scales`` (float32 [out]) in the place of its ``weight``. Nobody else
takes them for one, and the folder has a sha256 of its own: servers of 8 and of 16 bits, which answer differently, are
of two models.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from firsttoken.assets.checkpoint import CODES, StoredTensor, check_shard, combined_sha256, model_files
from firsttoken.assets.empty_model import build_on_meta, set_parameter
from firsttoken.assets.model_config import CONFIG
from firsttoken.assets.servable import check_servable
from firsttoken.assets.weights import check_tied, read_tensor, tensors_of
from firsttoken.engine.linear8 import UNROUNDED, Linear8, quantize
from firsttoken.study.errors import ModelError, SwarmError
from firsttoken.study.files import new_folder
from firsttoken.study.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SCALES = "scales"
_WEIGHT = re.compile(r"(model\.layers\.\d{1,6}\..+)\.weight")
_BESIDE = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_BESIDE += ("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja")
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")


def model_sha256(folder: Path) -> str:
    """Return the sha256 by which servers and clients of one model agree on it, over config.json and all weight files,
    read once.

    Raises ModelError for a folder that cannot be served.
    """
    return combined_sha256([*check_servable(folder, in_8_bits=True).files, folder / CONFIG])


def parse_blocks(text: str, depth: int) -> range:
    """ "a:b" as blocks [a, b) of a model of ``depth``. Raises SwarmError for anything else."""
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    if not match or not int(match[1]) < int(match[2]) <= depth:
        raise SwarmError(f"blocks {text!r} are not a:b with 0 <= a < b <= {depth}, the model's depth")
    return range(int(match[1]), int(match[2]))


def load_span(folder: Path, blocks: range, dtype: torch.dtype) -> PreTrainedModel:
    """The model with ``blocks`` only, as the whole model has them, in ``dtype``; its ends stay without memory.

    Only the bytes of these blocks are read. Raises ModelError for a folder that cannot be served.
    """
    model = build_on_meta(folder, dtype, blocks)

    def place(name: str) -> str | None:
        match = _LAYER.fullmatch(name)
        if not match or int(match[1]) not in blocks:
            return None
        return f"model.layers.{int(match[1]) - blocks.start}.{match[2]}"

    _fill(model, folder, place)
    return _checked(model, folder, lambda name: _LAYER.fullmatch(name) is not None)


def load_ends(folder: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The model with embedding, norm and head in ``dtype`` on ``device``; its blocks stay without memory. Raises as
    ``load_span``."""
    model = build_on_meta(folder, dtype)
    model.model.rotary_emb.to(device)
    parameters = dict(model.named_parameters())
    _fill(model, folder, lambda name: name if name in parameters and not _LAYER.fullmatch(name) else None, device)
    model.tie_weights()
    return _checked(model, folder, lambda name: _LAYER.fullmatch(name) is None)


def _fill(
    model: PreTrainedModel, folder: Path, name_in_model: Callable[[str], str | None], device: str = "cpu"
) -> None:
    """Put the tensors that ``name_in_model`` gives a name in ``model`` there."""
    in_8_bits: dict[str, dict[str, Tensor]] = {}
    files = check_servable(folder, in_8_bits=True)
    for stored, tensor in tensors_of(files, lambda name: name_in_model(name) is not None):
        name = name_in_model(stored)
        path, _, leaf = name.rpartition(".")
        if leaf in (CODES, SCALES):
            in_8_bits.setdefault(path, {})[leaf] = tensor
        else:
            set_parameter(model, name, tensor.to(device))
    for path, parts in in_8_bits.items():
        put_8_bits(model, path, parts)


def _checked(model: PreTrainedModel, folder: Path, wanted: Callable[[str], bool]) -> PreTrainedModel:
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta and wanted(name)]
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} tensors, first {missing[0]}; copy the whole checkpoint")
    return model


def write_8_bits(source: Path, target: Path) -> int:
    """Write the model in folder ``source`` to ``target``, its blocks in 8 bits; the bytes of its weights.

    One shard is in memory at a time; what was written until an interruption is removed. Raises ModelError for a
    ``source`` that cannot be served, rests in 8 bits already or holds weights that are not finite, and for a
    ``target`` that is there.
    """
    if target.exists():
        raise ModelError(f"{target} is there already: remove it, or name another folder")
    listed = check_servable(source)
    check_tied(listed)
    files = listed.files
    with new_folder(target) as made:
        names: dict[str, str] = {}
        for number, file in enumerate(track(files, desc="into 8 bits", unit="shard"), 1):
            tensors = dict(_resting(file))
            shard = f"model-{number:05}-of-{len(files):05}.safetensors"
            save_file(tensors, made / shard, {"format": "pt"})
            names |= dict.fromkeys(tensors, shard)
        index = {"metadata": {}, "weight_map": names}
        (made / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
        for name in _BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, made / name)
    return model_files(target, in_8_bits=True).bytes


def _resting(file: Path) -> Iterator[tuple[str, Tensor]]:
    for name, entry in check_shard(file).tensors.items():
        tensor, match = read_tensor(StoredTensor(file, name, entry)), _WEIGHT.fullmatch(name)
        if not match or tensor.dim() != 2:
            yield name, tensor
            continue
        codes, scales = quantize(tensor)
        yield f"{match[1]}.{CODES}", codes
        yield f"{match[1]}.{SCALES}", scales


def put_8_bits(model: nn.Module, path: str, parts: Mapping[str, Tensor]) -> None:
    """Make ``parts`` (codes and scales) the linear layer ``path`` of ``model``. ModelError where they do not fit it."""
    parent, _, name = path.rpartition(".")
    try:
        linear = model.get_submodule(path)
    except AttributeError:
        linear = None
    if type(linear) is not nn.Linear:
        raise ModelError(f"the model has no linear layer {path}, of which the folder holds codes; write it again")
    codes, scales = parts.get(CODES), parts.get(SCALES)
    if codes is None or scales is None:
        raise ModelError(f"of {path} the folder holds {' and '.join(parts)} only; write it again")
    if codes.dtype != torch.int8 or codes.shape != linear.weight.shape:
        raise ModelError(f"{path}.{CODES} is {codes.dtype} {list(codes.shape)}, no int8 {list(linear.weight.shape)}")
    if scales.dtype != torch.float32 or scales.shape != codes.shape[:1]:
        raise ModelError(f"{path}.{SCALES} is {scales.dtype} {list(scales.shape)}, no float32 [{len(codes)}]")
    if not (torch.isfinite(scales).all() and (scales > 0).all()):
        raise ModelError(f"{path}.{SCALES} holds a number that is no scale; write the folder again")
    setattr(model.get_submodule(parent), name, Linear8(codes, scales, linear.bias, UNROUNDED))
