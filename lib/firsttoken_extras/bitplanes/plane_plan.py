"""Plans that bring the first bits of every weight first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from firsttoken.progressiveserve.checkpoint.names import layer_of
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Part, Stage, single_stage
from firsttoken.study.errors import StageError
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of
from firsttoken_extras.bitplanes.plane_format import PlannedPlane

PlaneOrder: TypeAlias = Callable[[Sequence[str], int], Sequence[Sequence[tuple[str, int]]]]
"""The parts of a model in the order of the forward pass, and the number of planes -> what each stage brings, one after
the other: a plane (0-based) of a part."""


def plane_after_plane(parts: Sequence[str], planes: int) -> list[list[tuple[str, int]]]:
    """Bring the first plane of every part, then the second of every part, each in the order of the forward pass."""
    return [[(part, plane) for part in parts] for plane in range(planes)]


def by_planes(shapes: Mapping[str, tuple[int, ...]], split: str, order: PlaneOrder = plane_after_plane) -> LoadPlan:
    """The planes of every matrix by ``split`` in this ``order``, the first stage with what is needed for a token.

    ``shapes`` are those of the tensors by name. Vectors (norms, biases) come whole with the first plane. Raises
    StageError as ``by_layers`` does, for a split that does not exist, and for an order that brings a plane before the
    one below it.
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

    parts = {part.name: first(part) for part in stage.parts}
    stages = []
    for number, brought in enumerate(order(list(parts), planes_of(split)), start=1):
        if unknown := next((name for name, _ in brought if name not in parts), ""):
            raise StageError(f"the order of the planes names {unknown!r}: choose one of {', '.join(parts)}")
        planes = [_plane(parts[name], plane) for name, plane in brought if plane == 0 or parts[name].coding]
        stages.append(Stage(f"plane-{number}" if number > 1 else stage.name, tuple(planes)))
    plan = LoadPlan(tuple(stages))
    plan.check(list(shapes))
    return plan


def _plane(part: Part, plane: int) -> Part:
    if plane == 0:
        return part
    tensors = tuple(name for name in part.tensors if name not in part.coding.whole)
    return replace(part, tensors=tensors, action="refine", coding=PlannedPlane(part.coding.split, plane))
