"""PEFT folders on disk, in 16 bits and with the recipe beside them.

Plain ``PeftModel.from_pretrained`` loads them; ``recipe.json`` says what they were made from.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from firsttoken.assets.adapter_files import CONFIG, RECIPE, WEIGHTS
from firsttoken.study.files import new_folder, write_text


def export_adapter(peft: PeftModel, folder: Path, recipe: dict[str, Any]) -> Path:
    """Write the active adapter to ``folder`` in fp16 with ``recipe`` as recipe.json; the folder appears whole."""
    with new_folder(folder, over_older=True) as draft:
        peft.save_pretrained(draft)
        (draft / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        _portable(draft / CONFIG)
        halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in load_file(draft / WEIGHTS).items()}
        save_file(halves, draft / WEIGHTS, metadata={"format": "pt"})
        write_text(draft / RECIPE, _dump(recipe))
    return folder


def _portable(config: Path) -> None:
    """Drop the base's folder, which PEFT records from the machine that trained: the recipe's base hash says it for any
    machine."""
    content = json.loads(config.read_text(encoding="utf-8")) | {"base_model_name_or_path": None}
    for key in ("target_modules", "layers_to_transform"):  # sets: in a new order each time they are saved
        content[key] = content[key] and sorted(content[key])
    write_text(config, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _dump(recipe: dict[str, Any]) -> str:
    """JSON with one line a step of the curve, so that the file can be read and compared."""
    head = json.dumps({k: v for k, v in recipe.items() if k != "curve"}, indent=1, sort_keys=True)
    steps = ",\n".join("  " + json.dumps(row) for row in recipe["curve"])
    return f'{head[:-2]},\n "curve": [\n{steps}\n ]\n}}\n'
