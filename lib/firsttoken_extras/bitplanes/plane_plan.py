"""Plans that bring the first bits of every weight first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from firsttoken.progressiveserve.checkpoint.names import layer_of
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Part, Stage, single_stage
from firsttoken.study.errors import StageError
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of
from firsttoken_extras.bitplanes.plane_format import PlannedPlane


def by_planes(shapes: Mapping[str, tuple[int, ...]], split: str) -> LoadPlan:
    """The first plane of every matrix by ``split``, then plane after plane, each stage in the order of the forward
    pass.

    ``shapes`` are those of the tensors by name. Vectors (norms, biases) come whole with the first plane. Raises
    StageError as ``by_layers`` does, and for a split that does not exist.
    """
    if split not in SPLITS:
        raise StageError(f"no split of weights is called {split!r}: choose one of {', '.join(SPLITS)}")
    (stage,) = single_stage(list(shapes), len({layer_of(name) for name in shapes} - {None})).stages
    matrices = {name for name, shape in shapes.items() if len(shape) > 1 and 0 not in shape}

    def first(part: Part) -> Part:
        if matrices.isdisjoint(part.tensors):
            return part
        return replace(
            part, coding=PlannedPlane(split, 0, tuple(name for name in part.tensors if name not in matrices))
        )

    parts = tuple(map(first, stage.parts))
    later = [
        Stage(f"plane-{plane + 1}", tuple(_refining(part, plane) for part in parts if part.coding))
        for plane in range(1, planes_of(split))
    ]
    plan = LoadPlan((replace(stage, parts=parts), *later))
    plan.check(list(shapes))
    return plan


def _refining(part: Part, plane: int) -> Part:
    tensors = tuple(name for name in part.tensors if name not in part.coding.whole)
    return replace(part, tensors=tensors, action="refine", coding=PlannedPlane(part.coding.split, plane))
