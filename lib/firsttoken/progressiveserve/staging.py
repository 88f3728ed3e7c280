"""A profile's model as a staged checkpoint: what ``firsttoken stage`` writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_served
from firsttoken.progressiveserve.checkpoint.manifest import Manifest
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Origin, TensorSource, staged
from firsttoken.progressiveserve.checkpoint.sources import FolderSource, ModelSource, RandomSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.progressiveserve.recipe import RECIPES
from firsttoken.study import paths
from firsttoken.study.errors import StageError
from firsttoken.study.profile import Profile

RANDOM, NONE = "random:", "none"
MakePlan = Callable[[Mapping[str, tuple[int, ...]]], LoadPlan]
"""A plan of one's own: of the shapes of the model's tensors by name."""


def stage_model(profile: Profile, folder: Path, recipe: str = "", make_plan: MakePlan | None = None) -> Manifest:
    """Write the model of ``profile`` to ``folder`` in three stages, A, B and C, with the adapters of ``recipe``.

    Without a recipe they are those of the profile's best; "none" leaves the stages unhealed, as random weights are.
    A folder without a task adapter is copied tensor by tensor, and random weights are drawn so: neither is ever whole
    in memory. With ``make_plan`` the stages are those of the plan that it makes, without adapters.
    Raises StageError for an unknown recipe, adapters beside another plan and a missing one, and what loading, planning
    and staging raise.
    """
    if make_plan and recipe not in ("", NONE):
        raise StageError(f"adapters of {recipe!r} heal stages of layers, and this plan has others: choose one of both")
    recipe = recipe or best_recipe(profile)
    if recipe not in (NONE, *RECIPES):
        raise StageError(f"no adapters of {recipe!r}; choose {', '.join(RECIPES)} or {NONE}")
    config = profile.section("served", ServedConfig)
    unhealed = bool(make_plan) or recipe == NONE or profile.model.startswith(RANDOM)
    config.check_adapters(() if unhealed else (recipe,))
    source = _source(profile, config)
    if make_plan:
        return write_staged(source, make_plan(source.shapes), folder)
    plan = config.plan(source.config.num_hidden_layers)
    adapters = {} if unhealed else stage_adapters(config, recipe)
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
