"""A model without memory, and weights put into it one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from firsttoken.assets.known_models import check_keys, unread_keys
from firsttoken.assets.model_config import CONFIG, read_config
from firsttoken.study.errors import ModelError, first_line

if TYPE_CHECKING:  # a lean start needs none of it
    from transformers import PretrainedConfig, PreTrainedModel

_MEND = f"copy {CONFIG} and weights of one model"


def stock_config(folder: Path) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """transformers' class of the model in ``folder``, and the configuration that its config.json describes.

    The class is looked up by name, because transformers' Auto classes import every configuration there is (1.5 s on two
    cores). Raises ModelError when transformers does not know it, or config.json does not fit it.
    """
    import transformers

    own_config = read_config(folder)
    kind = getattr(transformers, own_config.architecture, None)
    if kind is None:
        raise ModelError(
            f"{folder / CONFIG}: transformers knows no {own_config.architecture}; use a model that it knows"
        )
    try:
        content, _ = kind.config_class.get_config_dict(folder, local_files_only=True)
        if own_config.stored is None:  # "auto", which transformers takes from who loads and not from a file
            content = {key: value for key, value in content.items() if key not in ("dtype", "torch_dtype")}
        config = kind.config_class.from_dict(content)
    except Exception as error:  # of many kinds: the values of the file may be anything
        raise ModelError(f"{folder / CONFIG} is unusable ({first_line(error)}); copy the model's own") from error
    if own_config.model_type not in (kind.config_class.model_type, None):
        raise ModelError(
            f"{folder / CONFIG}: the model_type {own_config.model_type} is not that of {own_config.architecture}; copy "
            "the model's own"
        )
    # A key that the class does not read is an attribute all the same, and one of an older name that it reads is none
    names = dict.fromkeys((*config.attribute_map, *config.attribute_map.values(), *vars(kind.config_class())))
    used = {key: content[key] for key in content if key in vars(config) or key in names}
    check_keys(folder / CONFIG, unread_keys(used, names))
    return kind, config


def build_on_meta(folder: Path, dtype: torch.dtype, layers: range | None = None) -> PreTrainedModel:
    """The model that ``folder/config.json`` describes, with every parameter on the meta device and in ``dtype``.

    With ``layers`` it has these only, each as the whole model has it, under its own number there. Only what no file
    holds is real: rotary tables and other buffers. Raises ModelError as :func:`stock_config`, and for a model that is
    not built as Llama is.
    """
    kind, config = stock_config(folder)
    try:
        model = empty_model(kind, config, dtype)
        if layers is not None:
            model.model.layers = model.model.layers[layers.start : layers.stop]
        return model
    except Exception as error:  # of many kinds, as above
        reason = first_line(error)
        raise ModelError(f"{folder}: its {CONFIG} is of no Llama-like {kind.__name__} ({reason}); use one") from error


def empty_model(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model of ``kind`` and ``config`` in eval mode, as :func:`build_on_meta` makes it."""
    config.dtype = dtype
    with on_meta(dtype):
        model = kind(config)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)
    for module in model.modules():
        if absent := {
            name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta
        }:
            module._buffers |= {name: torch.empty_like(buffer, device="cpu") for name, buffer in absent.items()}
            model._init_weights(module)  # which transformers calls, too, for what no file holds
    return model.eval().requires_grad_(False)


@contextmanager
def on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Modules that are made inside the block have parameters of ``dtype`` on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def tie_head(model: nn.Module) -> nn.Module:
    """Tie the head where the model ties it. Raises ModelError naming the first parameter that is still missing."""
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ModelError(f"{len(missing)} parameters were never brought, first {missing[0]}; copy the whole checkpoint")
    return model


def set_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make ``tensor`` the parameter ``name`` of ``model``, without a copy where its dtype is already the model's.

    Raises ModelError for a name that the model does not have and for a wrong shape.
    """
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        old = module._parameters[leaf]
    except (AttributeError, KeyError):
        raise ModelError(f"the model has no parameter {name}; {_MEND}") from None
    if old.shape != tensor.shape:
        raise ModelError(f"{name} has shape {list(tensor.shape)}, the model wants {list(old.shape)}; {_MEND}")
    module._parameters[leaf] = nn.Parameter(tensor.to(old.dtype), requires_grad=False)
