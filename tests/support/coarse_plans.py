"""A plan that brings every tensor twice: rounded first, exactly later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Stage, single_stage


def coarse_first(names: Sequence[str], depth: int, dtype: str = "F8_E5M2") -> LoadPlan:
    """Stage 1 brings every tensor rounded to ``dtype``, stage 2 overwrites each with the exact one."""
    (stage,) = single_stage(names, depth).stages
    coarse = tuple(replace(part, dtype=dtype) for part in stage.parts)
    exact = tuple(replace(part, action="refine") for part in stage.parts)
    plan = LoadPlan((Stage("coarse", coarse), Stage("exact", exact)))
    plan.check(names)
    return plan
