"""A model without memory, and weights put into it one by one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from firsttoken.assets.model_config import read_config
from firsttoken.assets.on_meta import on_meta
from firsttoken.study.errors import ModelError

if TYPE_CHECKING:  # a lean start needs none of it
    from transformers import PreTrainedModel


def build_on_meta(folder: Path, dtype: torch.dtype, layers: range | None = None) -> PreTrainedModel:
    """The model that ``folder/config.json`` describes, with every parameter on the meta device and in ``dtype``.

    With ``layers`` it has these only, numbered from 0. Only the rotary tables are real: no file holds them. The class
    is looked up by name, because transformers' Auto classes import every configuration there is (1.5 s on two cores).
    Raises ModelError when the folder has no usable config.json.
    """
    import transformers

    from firsttoken.assets.lock import first_line  # which reads YAML; a lean start has none

    sizes = read_config(folder)
    try:
        kind = getattr(transformers, sizes.architecture)
        config = kind.config_class.from_pretrained(folder, local_files_only=True)
        if layers is not None:
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[layers.start : layers.stop]
            config.num_hidden_layers = len(layers)
        return empty_model(kind, config, dtype)
    except Exception as error:  # of many kinds: the file names the class, and its sizes may be anything
        reason = first_line(error)
        raise ModelError(f"{folder} has no config.json of a model that transformers knows ({reason})") from error


def empty_model(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model of ``kind`` and ``config`` in eval mode, as :func:`build_on_meta` makes it."""
    config.dtype = dtype
    with on_meta(dtype):
        model = kind(config)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)
    return model.eval().requires_grad_(False)


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make ``tensor`` the parameter ``name`` of ``model``, without a copy where its dtype is already the model's.

    Raises ModelError for a name that the model does not have and for a wrong shape.
    """
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        old = module._parameters[leaf]
    except (AttributeError, KeyError):
        raise ModelError(
            f"the model has no parameter {name}, which its weights hold; copy config.json and weights of one model"
        ) from None
    if old.shape != tensor.shape:
        shapes = f"{name} has shape {list(tensor.shape)}, the model wants {list(old.shape)}"
        raise ModelError(f"{shapes}; copy config.json and weights of one model")
    module._parameters[leaf] = nn.Parameter(tensor.to(old.dtype), requires_grad=False)
