"""The sources of a staged checkpoint's tensors: a folder, a model in memory, or random numbers."""

from __future__ import annotations

import copy
import hashlib
import shutil
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.empty_model import stock_config
from firsttoken.assets.known_models import check_family
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.assets.servable import check_servable, model_shapes
from firsttoken.assets.shapes import shape_config
from firsttoken.assets.text_tokenizer import check_same_ids
from firsttoken.assets.weights import check_tied, read_tensor
from firsttoken.progressiveserve.checkpoint.names import SERVED, torch_dtype
from firsttoken.progressiveserve.checkpoint.plan import Origin
from firsttoken.study.errors import ModelError

_SIDE_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


class FolderSource:
    """A local Hugging Face folder, its safetensors in one file or in shards; what it stores is taken as it is."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError for a folder that cannot be served, a tensor of no dtype that is served, a tied head that
        is not the embedding, and where F16 and BF16 are mixed."""
        self._folder, self._files = folder, check_servable(folder, way="stages")
        self.config: PretrainedConfig = stock_config(folder)[1]
        self.shapes = model_shapes(folder, self._files.config)
        self.names = list(self.shapes)
        self._stored = self._files.tensors
        for name in self.names:
            if name not in self._stored:
                raise ModelError(f"{folder} lacks {name}; copy the whole checkpoint")
            if (dtype := self._stored[name].entry.dtype) not in SERVED:
                raise ModelError(f"{name} in {folder} is stored as {dtype}; convert it to one of {', '.join(SERVED)}")
        if {"F16", "BF16"} <= {self._stored[name].entry.dtype for name in self.names}:
            raise ModelError(f"{folder} stores some weights as F16 and others as BF16; convert all to one")
        check_tied(self._files)

    @cached_property
    def provenance(self) -> Origin:
        """The folder's name, and the combined sha256 of its weight files as ``load_model`` gives it."""
        return Origin(self._folder.resolve().name, self._files.sha256, "real")

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self._stored[name].entry.dtype)

    def get(self, name: str) -> Tensor:
        return finite(name, read_tensor(self._stored[name]))

    def write_side_files(self, folder: Path) -> None:
        for pattern in _SIDE_FILES:
            for file in self._folder.glob(pattern):
                if not file.name.endswith(".safetensors.index.json"):
                    shutil.copyfile(file, folder / file.name)


class ModelSource:
    """A model in memory, such as the served one, whose weights have taken its task adapter in."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        provenance: Origin,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``provenance.sha256`` must stand for these weights: the same one means that nothing is staged again.
        ``dtype`` is the one to write, where the model computes in another. Raises ModelError for a family that is not
        staged."""
        check_family(type(model).__name__, "stages")
        self._model, self._tokenizer, self.provenance = model, tokenizer, provenance
        self._dtype = dtype
        self._tensors = dict(model.named_parameters())  # each once, so no tied head
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.names = list(self.shapes)
        self.config = copy.deepcopy(model.config)
        self.config.update({"architectures": [type(model).__name__], "dtype": dtype or model.dtype})

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or self._tensors[name].dtype

    def get(self, name: str) -> Tensor:
        return finite(name, self._tensors[name].detach().to(self._dtype))

    def write_side_files(self, folder: Path) -> None:
        for part in (self.config, self._model.generation_config, self._tokenizer):
            if part is not None:
                part.save_pretrained(folder)
        if self._tokenizer is not None:  # transformers does not read all that it saves as it was
            check_same_ids(folder, self._tokenizer)


class RandomSource:
    """Random weights of a named shape (assets.shapes), drawn tensor by tensor: a 7B model needs no 13 GB of memory.

    A tensor depends on ``seed`` and on its name alone, so that any subset, in any order, is the same.
    """

    def __init__(self, shape: str, dtype: torch.dtype, seed: int = 0) -> None:
        """Raises ModelError for a shape that is not known."""
        self.config = shape_config(shape)
        self.config.dtype = dtype
        self._dtype, self._seed = dtype, seed
        with quiet_transformers(), torch.device("meta"):  # the model is built without memory for it
            model = AutoModelForCausalLM.from_config(self.config)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        self.names = list(self.shapes)
        self.provenance = Origin(f"random:{shape}, seed {seed}, drawn by name", None, "random")

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def get(self, name: str) -> Tensor:
        tensor = torch.ones(self.shapes[name], dtype=self._dtype)
        if name.endswith("norm.weight"):
            return tensor
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        draw = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return tensor.normal_(0, self.config.initializer_range, generator=draw)

    def write_side_files(self, folder: Path) -> None:
        self.config.save_pretrained(folder)


def finite(name: str, tensor: Tensor) -> Tensor:
    """``tensor`` itself. Raises ModelError where it holds a number that is none, or is infinite."""
    if not torch.isfinite(tensor).all():
        raise ModelError(f"{name} holds numbers that are not finite; copy the weights again, or take another dtype")
    return tensor
