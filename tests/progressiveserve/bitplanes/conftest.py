"""Tiny models staged in planes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from firsttoken_extras.bitplanes.plan_spec import PlanSpec
from firsttoken_extras.bitplanes.plane_plan import by_planes


@pytest.fixture
def stage_planes(stage) -> Callable[..., object]:
    """Stages a model of six layers by a plan, all layers in the first stage unless it says otherwise."""

    def make(plan: str = "bits", dtype: torch.dtype = torch.bfloat16, kind: str = "llama", tied: bool = True):
        return stage(kind, tied, dtype, plan=lambda shapes: by_planes(shapes, PlanSpec.parse(plan)))

    return make
