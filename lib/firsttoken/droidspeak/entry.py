"""What the store keeps of one prefix: its tokens, and one named tensor a layer and an edge."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from firsttoken.droidspeak.identity import ModelIdentity
from firsttoken.droidspeak.prefix import PrefixCache
from firsttoken.droidspeak.tensor_bytes import check_numbers
from firsttoken.study.errors import CacheError


def layer_name(layer: int) -> str:
    """The name of the piece with keys, then values of a layer, [2, 1, kv_heads, tokens, head_dim]."""
    return f"layer.{layer}"


def e_cache_name(layer: int) -> str:
    """The name of the piece with the E-cache at a layer, [1, tokens, hidden]."""
    return f"edge.{layer}"


@dataclass(frozen=True)
class Entry:
    """One prefix that ``model`` computed: its token ids as bytes, and the layers whose E-cache is there."""

    model: ModelIdentity
    tokens: bytes
    edges: tuple[int, ...]

    @property
    def length(self) -> int:
        """The number of tokens of the prefix."""
        return len(self.tokens) // 8

    @cached_property
    def key(self) -> str:
        """The key of the entry, 32 hex digits for model and tokens."""
        return hashlib.sha256(self.model.key.encode() + self.tokens).hexdigest()[:32]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and the shape of each piece."""
        model, tokens = self.model, self.length
        layer, edge = (2, 1, model.kv_heads, tokens, model.head_dim), (1, tokens, model.hidden)
        return {layer_name(i): layer for i in range(model.layers)} | {e_cache_name(i): edge for i in self.edges}

    def pieces(self, cache: PrefixCache) -> Mapping[str, Tensor]:
        """Copy the tensors of ``cache`` to the CPU.

        Raises CacheError unless they are what the model makes of as many tokens in one row, in numbers that a layer
        computes with.
        """
        if len(cache.kv) != self.model.layers:
            raise CacheError(f"the cache has {len(cache.kv)} layers, {self.model} has {self.model.layers}")
        shapes, pieces = self.shapes, {}
        with torch.inference_mode(False):  # a tensor made in that mode could never be trained on
            for layer, kv in enumerate(cache.kv):
                name = layer_name(layer)
                for half, tensor in zip(("keys", "values"), kv, strict=True):
                    self._check(f"the {half} of layer {layer}", tensor, shapes[name][1:])
                pieces[name] = torch.stack([kv.keys.detach(), kv.values.detach()]).cpu()
            for layer in self.edges:
                name = e_cache_name(layer)
                if not 0 <= layer < self.model.layers:
                    raise CacheError(f"an E-cache at layer {layer} fits no model of {self.model.layers} layers")
                self._check(f"the E-cache at layer {layer}", cache.e_cache[layer], shapes[name])
                pieces[name] = cache.e_cache[layer].detach().to("cpu", copy=True).contiguous()
        for name, piece in pieces.items():
            check_numbers(piece, name)
        return pieces

    def _check(self, subject: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (self.model.dtype, shape):
            raise CacheError(
                f"{subject} are {dtype} {list(tensor.shape)}, but {self.model} makes {self.model.dtype} {list(shape)} "
                f"of {self.length} tokens; store what it computed for them"
            )
