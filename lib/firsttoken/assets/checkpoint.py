"""Is this folder a whole safetensors checkpoint? Asked before transformers is, whose answers are long."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from firsttoken.assets.lock import file_sha256
from firsttoken.assets.model_config import CONFIG, read_config
from firsttoken.study.errors import ModelError
from firsttoken.study.foreign.faults import Damaged, blaming, shown
from firsttoken.study.foreign.json_text import read_json
from firsttoken.study.foreign.schema import shaped, unknown
from firsttoken.study.foreign.tensors import Header, read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_SHARD = re.compile(r"(\d+-[\w.-]+/)?[\w-][\w.-]*\.safetensors")  # a staged checkpoint's lie one folder below


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


STORED = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
}
"""What a weight may be stored in: safetensors' name of a dtype, and torch's."""

CODES = "codes"  # what a linear layer has in the place of a weight where it rests in 8 bits


def weight_files(folder: Path, *, in_8_bits: bool = False) -> list[Path]:
    """The safetensors shards of a checkpoint folder, in name order, each checked to be whole.

    Raises ModelError when the folder has no config.json, no safetensors (pickled .bin weights are refused, because
    loading them runs code), when a shard is missing or truncated, or when it holds layers beyond those of config.json:
    a model of fewer layers would answer, and answer something else. Weights ``in_8_bits`` are refused unless they are
    asked for.
    """
    if not os.path.isdir(folder):  # of a name that is too long pathlib's own raises
        raise ModelError(f"no model folder {folder}; give a folder with config.json and *.safetensors")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; a model folder holds config.json and *.safetensors")
    headers = {shard: check_shard(shard) for shard in _listed(folder)}
    with blaming(folder / "config.json", ModelError, "copy the model's own"):
        config = read_json(folder / "config.json", 1 << 24)
    depth = config.get("num_hidden_layers") if isinstance(config, dict) else None
    for shard, header in headers.items():
        if not in_8_bits and any(name.endswith(f".{CODES}") for name in header.tensors):
            raise ModelError(f"{folder} rests in 8 bits, which only `firsttoken swarm` serves; name the model itself")
        deepest = max((int(found[1]) for found in map(_LAYER.match, header.tensors) if found), default=-1)
        if isinstance(depth, int) and deepest >= depth:
            raise ModelError(
                f"{shard} holds layer {deepest}, counted from 0, and config.json says {depth}; copy config.json "
                "and weights of one model"
            )
    return list(headers)


def stored_dtype(folder: Path) -> str:
    """Torch's name of the dtype that config.json says the weights have; where it says nothing or "auto", that of the
    first weight which has one, as transformers takes it.

    Raises ModelError as :func:`weight_files`, and for a dtype that is unknown.
    """
    if (name := read_config(folder).stored) is not None:
        with blaming(folder / CONFIG, ModelError, "copy the model's own"):
            if name not in STORED.values():
                raise Damaged(f"dtype: {shown(name)} is not known; {unknown(name, STORED.values())}")
        return name
    entries = (entry for file in weight_files(folder) for entry in check_shard(file).tensors.values())
    return next((STORED[entry.dtype] for entry in entries if entry.dtype in STORED), STORED["F32"])


def check_shard(path: Path) -> Header:
    """The header of the safetensors file at ``path``. Raises ModelError unless it and the file fit each other."""
    if not path.is_file():
        raise ModelError(f"the shard {path.name} is missing in {path.parent}; copy it there again")
    with blaming(f"the shard {path}", ModelError, "copy it again"):
        return read_header(path)


def combined_sha256(files: list[Path]) -> str:
    """One hex sha256 for a list of files: that of their own sha256 sums and names, in name order."""
    return sum_of_sums({file: file_sha256(file) for file in files})


def sum_of_sums(sums: Mapping[Path, str]) -> str:
    """What :func:`combined_sha256` says of files whose sha256 ``sums`` are known."""
    lines = "".join(f"{sums[file]}  {file.name}\n" for file in sorted(sums))
    return hashlib.sha256(lines.encode()).hexdigest() if len(sums) > 1 else next(iter(sums.values()))


def _listed(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        with blaming(index, ModelError, "copy it again"):
            names = set(shaped(_Index, read_json(index), others=True).weight_map.values())
            if odd := next((name for name in sorted(names) if not _SHARD.fullmatch(name)), ""):
                raise Damaged(f"{shown(odd)} is no name of a shard beside it")
        return sorted(folder / name for name in names)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if any(folder.glob("*.bin")):
        raise ModelError(f"{folder} has only .bin weights; loading those runs code: convert them to safetensors")
    raise ModelError(f"{folder} has no {_SINGLE} and no {_INDEX}; copy the weights there")
