"""A profile's model as a staged checkpoint: what ``firsttoken stage`` writes."""

from __future__ import annotations

import os
from pathlib import Path

from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_served
from firsttoken.progressiveserve.bitplanes.plan_spec import Mixture
from firsttoken.progressiveserve.bitplanes.plane_plan import by_planes
from firsttoken.progressiveserve.checkpoint.manifest import Manifest
from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.sources import (
    FolderSource,
    ModelSource,
    Origin,
    RandomSource,
    TensorSource,
)
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.progressiveserve.recipe import RECIPES
from firsttoken.study import paths
from firsttoken.study.errors import StageError
from firsttoken.study.profile import Profile

RANDOM, NONE = "random:", "none"


def stage_model(profile: Profile, folder: Path, recipe: str = "", planes: str = "") -> Manifest:
    """Write the model of ``profile`` to ``folder`` in three stages, A, B and C, with the adapters of ``recipe``.

    Without a recipe they are those of the profile's best; "none" leaves the stages unhealed, as random weights are.
    A folder without a task adapter is copied tensor by tensor, and random weights are drawn so: neither is ever whole
    in memory. With ``planes`` (as ``bitplanes.plan_spec`` has them SPELLED) the first bits of weights come first,
    without adapters; the other bits, and layers that wait, come in the stages after it.
    Raises StageError for an unknown recipe, a missing adapter and a plan that is none, and what loading and staging
    raise.
    """
    if planes and recipe not in ("", NONE):
        raise StageError(f"adapters of {recipe!r} heal stages of layers, and planes are none: choose one of both")
    mixture = Mixture.parse(planes) if planes else None
    recipe = recipe or best_recipe(profile)
    if recipe not in (NONE, *RECIPES):
        raise StageError(f"no adapters of {recipe!r}; choose {', '.join(RECIPES)} or {NONE}")
    config = profile.section("served", ServedConfig)
    source = _source(profile, config)
    if mixture:
        return write_staged(source, by_planes(source.shapes, mixture), folder)
    plan = config.plan(source.config.num_hidden_layers)
    adapters = {} if recipe == NONE or profile.model.startswith(RANDOM) else stage_adapters(config, recipe)
    return write_staged(source, staged(source.names, plan), folder, adapters)


def best_recipe(profile: Profile) -> str:
    """The recipe whose adapters ``profile`` serves: the last of those that it compares."""
    return profile.section("quality", QualityConfig).recipes[-1]


def stage_adapters(config: ServedConfig, recipe: str) -> dict[int, Path]:
    """The folders of adapter A, for stage 1, and AB, for stage 2."""
    return {stage: config.folder / f"{letters}-{recipe}" for stage, letters in ((1, "A"), (2, "AB"))}


def served_source(served: ServedModel) -> ModelSource:
    """The served model, its task adapter merged, as a source of tensors."""
    kind = "random" if served.provenance["kind"] == "random" else "real"
    origin = Origin(str(served.provenance["source"]), served.sha256, kind)
    return ModelSource(served.model, served.tokenizer, origin, served.stored)


def _source(profile: Profile, config: ServedConfig) -> TensorSource:
    if profile.model.startswith(RANDOM):
        return RandomSource(profile.model.removeprefix(RANDOM), profile.stored_dtype(), profile.seed)
    folder = paths.expanded(profile.model)
    if os.path.isdir(folder) and not config.task_adapter:
        return FolderSource(folder)
    return served_source(load_served(profile))
