"""Plans that bring the first bits of every weight first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from firsttoken.progressiveserve.checkpoint.names import EMBEDDING, layer_of
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Part, Stage, by_layers
from firsttoken_extras.bitplanes.layouts import planes_of
from firsttoken_extras.bitplanes.plan_spec import UNCUT, PlanSpec
from firsttoken_extras.bitplanes.plane_format import PlannedPlane


def by_planes(shapes: Mapping[str, tuple[int, ...]], plan_spec: PlanSpec) -> LoadPlan:
    """The first plane of every matrix, but for layers that come later; then these; then plane after plane of all.

    ``shapes`` are those of the tensors by name. Vectors (norms, biases) come whole with the first plane. Each stage is
    in the order of the forward pass. Raises StageError as ``by_layers`` does, and for layers that do not fit.
    """
    depth = len({layer_of(name) for name in shapes} - {None})
    plan = by_layers(list(shapes), plan_spec.groups(depth))
    matrices = {name for name, shape in shapes.items() if len(shape) > 1 and 0 not in shape}

    def first(part: Part) -> Part:
        split = plan_spec.split_of(part.layer)
        if split == UNCUT or matrices.isdisjoint(part.tensors):
            return part
        whole = tuple(name for name in part.tensors if name not in matrices)
        return replace(part, coding=PlannedPlane(split, 0, whole))

    stages = [replace(stage, parts=tuple(map(first, stage.parts))) for stage in plan.stages]
    cut = sorted((part for stage in stages for part in stage.parts if part.coding), key=_forward)
    for plane in range(1, max(planes_of(part.coding.split) for part in cut)):
        parts = tuple(_refining(part, plane) for part in cut if plane < planes_of(part.coding.split))
        stages.append(Stage(f"plane-{plane + 1}", parts))
    made = LoadPlan(tuple(stages))
    made.check(list(shapes))
    return made


def _refining(part: Part, plane: int) -> Part:
    tensors = tuple(name for name in part.tensors if name not in part.coding.whole)
    return replace(part, tensors=tensors, action="refine", coding=PlannedPlane(part.coding.split, plane))


def _forward(part: Part) -> float:
    if part.layer is not None:
        return part.layer
    return -1.0 if EMBEDDING in part.tensors else float("inf")
