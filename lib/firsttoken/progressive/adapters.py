"""Adapters on disk: stock PEFT folders with the recipe beside them (the report's ``export_adapter_pt_and_recipe``).

The report stores a pickled ``.pt``; here the weights are safetensors in 16 bits, and ``recipe.json`` says which
layers, which base and which data they were made for, so that a wrong pairing is refused instead of served.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from firsttoken.study.errors import StageError
from firsttoken.study.files import write_text

WEIGHTS = "adapter_model.safetensors"


def export_adapter(peft: PeftModel, folder: Path, recipe: dict[str, Any]) -> Path:
    """Write the active adapter to ``folder`` in fp16 with ``recipe`` as recipe.json; the folder appears whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        draft = Path(made) / folder.name
        peft.save_pretrained(draft)
        (draft / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        _portable(draft / "adapter_config.json")
        halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in load_file(draft / WEIGHTS).items()}
        save_file(halves, draft / WEIGHTS, metadata={"format": "pt"})
        (draft / WEIGHTS).chmod(0o644)  # PEFT and safetensors keep the umask of a temporary file
        write_text(draft / "recipe.json", _dump(recipe))
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    return folder


def _portable(config: Path) -> None:
    """PEFT records the base's folder on the machine that trained; the recipe's base hash says it for any machine."""
    content = json.loads(config.read_text(encoding="utf-8")) | {"base_model_name_or_path": None}
    for key in ("target_modules", "layers_to_transform"):  # sets: in a new order each time they are saved
        content[key] = sorted(content[key])
    write_text(config, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _dump(recipe: dict[str, Any]) -> str:
    """JSON with one line a step of the curve, so that the file can be read and compared."""
    head = json.dumps({k: v for k, v in recipe.items() if k != "curve"}, indent=1, sort_keys=True)
    steps = ",\n".join("  " + json.dumps(row) for row in recipe["curve"])
    return f'{head[:-2]},\n "curve": [\n{steps}\n ]\n}}\n'


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe.json of an adapter. Raises StageError when the folder is no adapter of this project."""
    try:
        return json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StageError(f"no adapter in {folder}: recipe.json cannot be read; train it or check it out") from error


def check_fit(folder: Path, layers: Sequence[int], base_sha256: str | None) -> None:
    """Raise StageError unless the adapter in ``folder`` was trained on exactly ``layers`` of that base.

    PEFT itself attaches what matches and drops the rest without a word, which would serve a half-healed model.
    """
    recipe = read_recipe(folder)
    if not {"layers", "base_sha256"} <= recipe.keys():
        raise StageError(f"adapter {folder.name} has a recipe of another tool")
    if recipe["layers"] != list(layers):
        raise StageError(
            f"adapter {folder.name} was trained with layers {_spans(recipe['layers'])} present, this stage has "
            f"{_spans(layers)}: train one for this plan or choose the plan of its recipe.json"
        )
    if base_sha256 != recipe["base_sha256"]:
        raise StageError(
            f"adapter {folder.name} belongs to the base {str(recipe['base_sha256'])[:12]}, not {str(base_sha256)[:12]}"
        )
    try:
        rank = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"]
        with safe_open(folder / WEIGHTS, "pt") as weights:
            shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118, no mapping
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise StageError(f"adapter {folder.name} is not whole ({error}): copy it again") from error
    if any(rank not in shape for shape in shapes.values()):
        raise StageError(f"adapter {folder.name}: its weights are not of rank {rank}: copy it again")
    found = {int(name.split(".layers.")[1].split(".")[0]) for name in shapes}
    if found != set(layers):
        raise StageError(f"adapter {folder.name} holds weights for layers {_spans(sorted(found))} only: copy it again")


def load_adapter(model: PreTrainedModel, folder: Path, layers: Sequence[int], base_sha256: str | None) -> PeftModel:
    """Attach the adapter in ``folder`` to ``model``, in which exactly ``layers`` compute.

    Raises StageError as :func:`check_fit` does.
    """
    check_fit(folder, layers, base_sha256)
    return PeftModel.from_pretrained(model, str(folder)).eval()


def _spans(layers: Sequence[int]) -> str:
    """0,1,2,5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)
