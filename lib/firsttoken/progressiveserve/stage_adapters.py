"""Adapters on disk: stock PEFT folders with the recipe beside them (the report's ``export_adapter_pt_and_recipe``).

The report stores a pickled ``.pt``; here the weights are safetensors in 16 bits, and ``recipe.json`` says which
layers, which base and which data they were made for, so that a wrong pairing is refused instead of served.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel

from firsttoken.assets.adapter_config import MEND
from firsttoken.assets.adapter_files import WEIGHTS, lora_halves, read_adapter
from firsttoken.study.errors import StageError
from firsttoken.study.parsing.parse_errors import errors_as, read_bytes


def check_fit(folder: Path, layers: Sequence[int], base_sha256: str | None) -> None:
    """Raise StageError unless the adapter in ``folder`` was trained on exactly ``layers`` of that base.

    PEFT itself attaches what matches and drops the rest without a word, which would serve a half-healed model.
    """
    made, config = read_adapter(folder)
    if base_sha256 != made.base_sha256:
        raise StageError(
            f"adapter {folder.name} belongs to the base {made.base_sha256[:12]}, not {str(base_sha256)[:12]}: name the "
            "folder of this model's own (served.adapters), or train them (firsttoken measure healing_training)"
        )
    if made.layers != tuple(layers):
        raise StageError(
            f"adapter {folder.name} was trained with layers {_spans(made.layers)} present, this stage has "
            f"{_spans(layers)}: train one for this plan or choose the plan of its recipe.json"
        )
    with errors_as(folder / WEIGHTS, StageError, MEND):
        halves = lora_halves(config, read_bytes(folder / WEIGHTS))
    if halves.keys() != set(layers):
        raise StageError(f"adapter {folder.name} holds weights for layers {_spans(sorted(halves))} only: copy it again")
    for path, layer in itertools.product(sorted(set().union(*halves.values())), layers):
        if path not in halves[layer] and config.targets(f"model.layers.{layer}.{path}"):
            raise StageError(f"adapter {folder.name}: {path} of layer {layer} has no weights; {MEND}")


def load_adapter(model: PreTrainedModel, folder: Path, layers: Sequence[int], base_sha256: str | None) -> PeftModel:
    """Attach the adapter in ``folder`` to ``model``, in which exactly ``layers`` compute.

    Raises StageError as :func:`check_fit` does.
    """
    check_fit(folder, layers, base_sha256)
    return PeftModel.from_pretrained(model, str(folder)).eval()


def _spans(layers: Sequence[int]) -> str:
    """Write ``layers`` as runs: 0,1,2,5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)
