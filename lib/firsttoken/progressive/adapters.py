"""Adapters on disk: stock PEFT folders with the recipe beside them (the report's ``export_adapter_pt_and_recipe``).

The report stores a pickled ``.pt``; here the weights are safetensors in 16 bits, and ``recipe.json`` says which
layers, which base and which data they were made for, so that a wrong pairing is refused instead of served.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from peft import PeftModel
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from firsttoken.assets.adapters import WEIGHTS, read_recipe
from firsttoken.study.errors import StageError


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
