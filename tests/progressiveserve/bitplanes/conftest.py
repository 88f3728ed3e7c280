"""Tiny models staged in planes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from firsttoken_extras.bitplanes.plane_plan import by_planes


@pytest.fixture
def stage_planes(stage) -> Callable[..., object]:
    """Stages a model of six layers by a split, all layers in each stage."""

    def make(split: str = "bits", dtype: torch.dtype = torch.bfloat16, kind: str = "llama", tied: bool = True):
        return stage(kind, tied, dtype, plan=lambda shapes: by_planes(shapes, split))

    return make
