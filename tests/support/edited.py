"""Files as somebody leaves them who changes a part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def config(**values: Any) -> Callable[[Path], None]:
    """Sets keys of a model folder's config.json."""
    return lambda folder: set_keys(folder / "config.json", **values)


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Changes the tensors of a model folder of one file."""
    return lambda folder: set_tensors(folder / "model.safetensors", change)
