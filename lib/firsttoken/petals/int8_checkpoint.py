"""A model folder whose blocks rest in 8 bits, and its blocks for a server: half the bytes on disk and in memory.

Beside each tensor that stays as it is, the folder holds of a linear layer ``codes`` (int8 [out, in]) and ``scales``
(float32 [out]) in the place of its ``weight``. Nobody else takes them for one, and the folder has a sha256 of its own:
servers of 8 and of 16 bits, which answer differently, are of two models.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from firsttoken.assets.checkpoint import CODES, model_files
from firsttoken.assets.model_config import CONFIG
from firsttoken.assets.servable import check_servable
from firsttoken.assets.weights import check_tied
from firsttoken.engine.linear8 import KEPT, Linear8, coded
from firsttoken.study.errors import ModelError

SCALES = "scales"
_WEIGHT = re.compile(r"(model\.layers\.\d{1,6}\..+)\.weight")
_BESIDE = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_BESIDE += ("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")


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
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        names: dict[str, str] = {}
        for number, file in enumerate(tqdm(files, desc="into 8 bits", unit="shard", disable=None), 1):
            tensors = dict(_resting(file))
            shard = f"model-{number:05}-of-{len(files):05}.safetensors"
            save_file(tensors, partial / shard, {"format": "pt"})
            names |= dict.fromkeys(tensors, shard)
        index = {"metadata": {}, "weight_map": names}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
        for name in _BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        partial.chmod(0o755)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return model_files(target, in_8_bits=True).bytes


def _resting(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no dict)
            tensor, found = opened.get_tensor(name), _WEIGHT.fullmatch(name)
            if not found or tensor.dim() != 2:
                yield name, tensor
                continue
            codes, scales = coded(tensor)
            yield f"{found[1]}.{CODES}", codes
            yield f"{found[1]}.{SCALES}", scales


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
    setattr(model.get_submodule(parent), name, Linear8(codes, scales, linear.bias, KEPT))
