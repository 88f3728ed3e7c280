"""The needs of a replica that borrows from a checkpoint: the ends first, and its neighbour's name of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firsttoken.assets.checkpoint import sum_of_sums
from firsttoken.progressiveserve.checkpoint.manifest import CONFIG, Manifest
from firsttoken.progressiveserve.checkpoint.names import EMBEDDING, HEAD, NORM
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Part, Stage, single_stage


def ends_first(names: Sequence[str], depth: int) -> LoadPlan:
    """One stage of embedding, norm and head in one file, and of layer after layer behind them: what is read in this
    order can begin to borrow when its first file is there. Raises StageError as ``whole``."""
    (stage,) = single_stage(names, depth).stages
    end_part = Part("ends", tuple(name for name in (EMBEDDING, NORM, HEAD) if name in names))
    plan = LoadPlan((Stage(stage.name, (end_part, *(part for part in stage.parts if part.layer is not None))),))
    plan.check(names)
    return plan


def neighbours_name(folder: Path, manifest: Manifest) -> str:
    """Return the name by which a server of the checkpoint in ``folder`` calls the model
    (``checkpoint_blocks.model_sha256``), from the sums in ``manifest``: the replica has read none of the files yet."""
    sums = {folder / part.file: part.sha256 for stage in manifest.stages for part in stage.parts}
    return sum_of_sums(sums | {folder / CONFIG: manifest.side[CONFIG].sha256})
