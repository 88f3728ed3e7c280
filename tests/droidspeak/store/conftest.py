"""Identities and caches that no model has computed: the store does not look at the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from firsttoken.droidspeak.identity import ModelIdentity
from firsttoken.droidspeak.prefix import LayerKV, PrefixCache

SMALL: dict[str, Any] = {
    "weights": "aa",
    "adapters": "",
    "dtype": "float32",
    "architecture": "LlamaForCausalLM",
    "layers": 3,
    "kv_heads": 2,
    "head_dim": 2,
    "hidden": 5,
    "rope": "{}",
    "tokenizer": "cc",
    "config": "{}",
}


@pytest.fixture(scope="session")
def identity() -> Callable[..., ModelIdentity]:
    """``identity(**changes)``: three layers, two KV heads of 2, hidden 5."""
    return lambda **changes: ModelIdentity(**(SMALL | changes))


@pytest.fixture(scope="session")
def drawn() -> Callable[..., PrefixCache]:
    """``drawn(model, context, edges=(), seed=0)``: a random cache of the right shapes."""

    def draw(model: ModelIdentity, context: Sequence[int], edges: Iterable[int] = (), seed: int = 0) -> PrefixCache:
        random, dtype = torch.Generator().manual_seed(seed), getattr(torch, model.dtype)

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(dtype)

        kv = (1, model.kv_heads, len(context), model.head_dim)
        layers = tuple(LayerKV(tensor(*kv), tensor(*kv)) for _ in range(model.layers))
        return PrefixCache(layers, {layer: tensor(1, len(context), model.hidden) for layer in edges})

    return draw
