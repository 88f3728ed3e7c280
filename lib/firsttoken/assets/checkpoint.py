"""Is this folder a whole safetensors checkpoint? Asked before transformers is, whose answers are long."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from firsttoken.assets.lock import file_sha256
from firsttoken.study.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors shards of a checkpoint folder, in name order, each checked to be whole.

    Raises ModelError when the folder has no config.json, no safetensors (pickled .bin weights are refused, because
    loading them runs code), or when a shard is missing or truncated.
    """
    if not folder.is_dir():
        raise ModelError(f"no model folder {folder}; give a folder with config.json and *.safetensors")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; a model folder holds config.json and *.safetensors")
    shards = _listed(folder)
    for shard in shards:
        check_shard(shard)
    return shards


def check_shard(path: Path) -> None:
    """Raise ModelError unless the file is as long as its own header says.

    Layout (huggingface/safetensors, "Format"): 8 bytes little-endian header length N, N bytes of JSON, then the data;
    ``data_offsets`` count from the end of the header.
    """
    if not path.is_file():
        raise ModelError(f"the shard {path.name} is missing in {path.parent}; copy it there again")
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 0 < length <= size - 8:
                raise ValueError("header longer than the file")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"the shard {path} is truncated or no safetensors file; copy it again") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(f"the shard {path} is truncated ({size:,} of {expected:,} bytes); copy it again")


def combined_sha256(files: list[Path]) -> str:
    """One hex sha256 for a list of files: that of their own sha256 sums and names, in name order."""
    lines = "".join(f"{file_sha256(file)}  {file.name}\n" for file in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest() if len(files) > 1 else file_sha256(files[0])


def _listed(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is truncated or no shard index; copy it again") from error
        return sorted(folder / name for name in names)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if any(folder.glob("*.bin")):
        raise ModelError(f"{folder} has only .bin weights; loading those runs code: convert them to safetensors")
    raise ModelError(f"{folder} has no {_SINGLE} and no {_INDEX}; copy the weights there")
