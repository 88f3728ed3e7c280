"""Plans that bring the first bits of every weight first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from firsttoken.progressive.checkpoint.names import EMBEDDING
from firsttoken.progressive.checkpoint.plan import LoadPlan, Part, Stage, by_layers
from firsttoken.progressive.planes.layouts import SPLITS, planes_of
from firsttoken.study.errors import StageError

UNCUT = "uncut"


def by_planes(
    shapes: Mapping[str, tuple[int, ...]], groups: Sequence[Sequence[int]], split: str, ends: str = ""
) -> LoadPlan:
    """The first plane of every matrix, by groups of layers as ``by_layers`` has them; then plane after plane of all.

    ``shapes`` are those of the tensors by name. Vectors (norms, biases) come whole with the first plane. The embedding
    and the head are cut by ``ends``, by default the same ``split``, or stay UNCUT. Each stage is in the order of the
    forward pass. Raises StageError as ``by_layers`` does, and for a split that does not exist.
    """
    for name in (split, *({ends} - {"", UNCUT})):
        if name not in SPLITS:
            raise StageError(f"no split of weights is called {name!r}: choose one of {', '.join(SPLITS)}")
    plan = by_layers(list(shapes), groups)
    matrices = {name for name, shape in shapes.items() if len(shape) > 1 and 0 not in shape}

    def first(part: Part) -> Part:
        chosen = split if part.layer is not None else ends or split
        if chosen == UNCUT or matrices.isdisjoint(part.tensors):
            return part
        return replace(part, split=chosen, whole=tuple(name for name in part.tensors if name not in matrices))

    stages = [replace(stage, parts=tuple(map(first, stage.parts))) for stage in plan.stages]
    cut = sorted((part for stage in stages for part in stage.parts if part.split), key=_forward)
    for plane in range(1, max(planes_of(part.split) for part in cut)):
        parts = tuple(_refining(part, plane) for part in cut if plane < planes_of(part.split))
        stages.append(Stage(f"plane-{plane + 1}", parts))
    made = LoadPlan(tuple(stages))
    made.check(list(shapes))
    return made


def _refining(part: Part, plane: int) -> Part:
    tensors = tuple(name for name in part.tensors if name not in part.whole)
    return replace(part, tensors=tensors, action="refine", plane=plane, whole=())


def _forward(part: Part) -> float:
    if part.layer is not None:
        return part.layer
    return -1.0 if EMBEDDING in part.tensors else float("inf")
