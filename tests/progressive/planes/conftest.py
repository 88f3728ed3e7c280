"""Tiny models staged in planes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from firsttoken.progressive.planes.plan import by_planes

LAYERS = 6


@pytest.fixture
def stage_planes(stage) -> Callable[..., object]:
    """Stages a model of six layers by a split, all layers in the first stage unless ``groups`` says otherwise."""

    def make(
        split: str = "bits",
        dtype: torch.dtype = torch.bfloat16,
        groups: Sequence[Sequence[int]] = (range(LAYERS),),
        ends: str = "",
        kind: str = "llama",
        tied: bool = True,
    ):
        return stage(kind, tied, dtype, plan=lambda shapes: by_planes(shapes, groups, split, ends))

    return make
