"""Finds the layers of a model, be it a stock, an adapted or a lean one."""

from torch import nn

from firsttoken.study.errors import ModelError


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a Llama-like model, also inside a PEFT wrapper; index 0 is next to the embedding.

    Raises ModelError for an architecture without ``model.layers``.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = getattr(getattr(base, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{type(base).__name__} has no model.layers; use a Llama-like one (Llama, Qwen2, ...)")
    return layers
