"""LoRA adapters on layers that come and go: stock PEFT files, attached a layer at a time, without PEFT.

PEFT attaches an adapter to a whole model and drops, without a word, what finds no layer; here layers appear one
group after another, and two stages serve side by side. Its import also costs a cold start more than stage 1's
adapter does to fetch. The arithmetic is PEFT's (``x A^T B^T alpha / r`` in fp32, which a decode step of the pinned
model does not notice and which rounding to bf16 would pay for with 0.1 % of perplexity); the tests hold the two equal.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from firsttoken.assets.adapter_config import MEND, LoraConfig, lora_config
from firsttoken.assets.adapter_files import lora_halves
from firsttoken.study.errors import StageError
from firsttoken.study.parsing.parse_errors import errors_as

Slices = Mapping[str, tuple[Tensor, Tensor]]
"""Module path inside a layer ("self_attn.q_proj") -> A [rank, in] and B [out, rank] in fp32, B already scaled."""


@dataclass(frozen=True)
class Adapter:
    """The slices of an adapter by layer (0-based), and the configuration that says which modules have some."""

    name: str
    layers: Mapping[int, Slices]
    config: LoraConfig

    def check_complete(self, layer: nn.Module, number: int) -> None:
        """Raise StageError where the configuration names a linear module of ``layer`` for which nothing came: PEFT
        would leave it as it was drawn."""
        slices = self.layers.get(number, {})
        for path, module in layer.named_modules():
            lacking = isinstance(module, nn.Linear) and path not in slices
            if lacking and self.config.targets(f"model.layers.{number}.{path}"):
                raise StageError(f"adapter {self.name}: {path} of layer {number} has no weights; {MEND}")


def parse_adapter(name: str, config: bytes, weights: bytes, device: str | torch.device) -> Adapter:
    """The adapter that a stock PEFT folder holds, from the bytes of its two files.

    Raises StageError for a file that is not whole, and for variants of LoRA that are not served here.
    """
    with errors_as(f"adapter {name}", StageError, MEND):
        options = lora_config(config)
        halves = lora_halves(options, weights)
    layers = {
        layer: {path: tuple(torch.from_numpy(half).to(device) for half in pair) for path, pair in modules.items()}
        for layer, modules in halves.items()
    }
    return Adapter(name, layers, options)


class LoraLinear(nn.Module):
    """A linear layer with a low-rank correction beside it; the layer itself is shared, not copied."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer and its correction to ``x`` [..., in] -> [..., out]."""
        y = self.base(x)
        return (y + functional.linear(functional.linear(x.float(), self.a), self.b)).to(y.dtype)


def with_adapter(layer: nn.Module, slices: Slices) -> nn.Module:
    """A twin of ``layer`` whose named linear modules carry ``slices``; weights and all other modules are shared.

    Raises StageError when the layer has no such module or the shapes do not fit.
    """
    twin = shared_copy(layer)
    for path, (a, b) in slices.items():
        parent, _, leaf = path.rpartition(".")
        try:
            base = twin.get_submodule(path)
        except AttributeError:
            base = None
        sizes = getattr(base, "out_features", None), getattr(base, "in_features", None)  # one may be packed
        if (b.shape[0], a.shape[1]) != sizes:
            raise StageError(f"the adapter's {path} does not fit this model's layers: train one for this model")
        twin.get_submodule(parent)._modules[leaf] = LoraLinear(base, a, b)
    return twin


@contextmanager
def reference_lora(layers: Sequence[nn.Module], adapter: Adapter) -> Iterator[None]:
    """Inside the block each linear module of ``layers`` that ``adapter`` is on computes with its weight and B A beside
    it: what :func:`with_adapter` is held to."""
    with ExitStack() as hooked:
        for number, slices in adapter.layers.items():
            for path, (a, b) in slices.items():

                def add(module: nn.Module, args: tuple[Tensor], y: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                    return (y + functional.linear(args[0].float(), b @ a)).to(y.dtype)

                hooked.callback(layers[number].get_submodule(path).register_forward_hook(add).remove)
        yield


def shared_copy(module: nn.Module, *, own_parameters: bool = False) -> Any:
    """A copy of the module tree of ``module`` that shares every tensor.

    Modules without children are shared themselves, so that a weight which arrives later shows in every copy, unless
    ``own_parameters``: then a tensor put into the copy leaves the original as it was.
    """
    if not module._modules and not own_parameters:
        return module
    twin = copy.copy(module)
    twin._forward_pre_hooks = module._forward_pre_hooks.copy()  # a gate on one stage's layer holds up no other's
    twin._parameters = dict(module._parameters)
    twin._modules = {
        name: child and shared_copy(child, own_parameters=own_parameters) for name, child in module._modules.items()
    }
    return twin
