"""Stages of a tiny model, all in memory, as views of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import nn
from transformers import PreTrainedModel

from firsttoken.progressive.loading.lora import CONFIG, WEIGHTS, parse_adapter
from firsttoken.progressive.loading.views import StageView, make_view
from firsttoken.progressive.passlayer import PassLayer

Views = Callable[..., list[StageView]]


@pytest.fixture
def views() -> Views:
    """Makes a view for each set of layers that are missing; ``adapters`` are PEFT folders or None, one for each."""

    whole: dict[int, list[nn.Module]] = {}  # activating a view changes the model's own list

    def make(model: PreTrainedModel, missing: Sequence[Sequence[int]], adapters: Sequence = ()) -> list[StageView]:
        ends = {"embed_tokens": model.model.embed_tokens, "norm": model.model.norm, "lm_head": model.lm_head}
        layers = whole.setdefault(id(model), list(model.model.layers))
        passed = [PassLayer() for _ in layers]
        made = []
        for number, gone in enumerate(missing, start=1):
            base = [passed[i] if i in gone else layer for i, layer in enumerate(layers)]
            folder = adapters[number - 1] if adapters else None
            files = [(folder / name).read_bytes() for name in (CONFIG, WEIGHTS)] if folder else None
            adapter = parse_adapter(str(number), *files, "cpu") if files else None
            made.append(make_view(number, base, ends, adapter))
        return made

    return make
