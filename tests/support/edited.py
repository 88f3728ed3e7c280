"""Files as somebody leaves them who changes a part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def set_keys(file: Path, **values: Any) -> None:
    """Of a JSON file; a key whose value is ``...`` goes."""
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def set_tensors(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Let ``change`` change the tensors of a safetensors file."""
    held = load_file(file)
    change(held)
    save_file(held, file, metadata={"format": "pt"})


def set_numbers(file: Path, value: float) -> None:
    """Fill all keys and values of a KV file with ``value``, beside the hashes that whoever reads it asks for."""
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    held, sums = load_file(file), json.loads(metadata["sha256"])
    for name in held.keys() - {"tokens"}:
        content = held[name].fill_(value).view(torch.uint8).numpy().tobytes()
        sums[name] = hashlib.sha256(content).hexdigest()
    save_file(held, file, metadata | {"sha256": json.dumps(sums)})


def config(**values: Any) -> Callable[[Path], None]:
    """Sets keys of a model folder's config.json."""
    return lambda folder: set_keys(folder / "config.json", **values)


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Changes the tensors of a model folder of one file."""
    return lambda folder: set_tensors(folder / "model.safetensors", change)
