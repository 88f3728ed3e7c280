"""The checkpoint that cold starts load: one model, staged and as one stock file, made once and kept in the cache."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from firsttoken.assets.corpora import load_qa
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_served
from firsttoken.progressiveserve.checkpoint.manifest import Manifest
from firsttoken.progressiveserve.checkpoint.plan import staged, whole
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin, RandomSource, TensorSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.samples import qa_prompt
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.progressiveserve.staging import RANDOM, best_recipe, served_source, stage_adapters
from firsttoken.study import paths
from firsttoken.study.dtypes import name_of
from firsttoken.study.profile import Profile
from firsttoken_extras.bitplanes.plan_spec import PlanSpec
from firsttoken_extras.bitplanes.plane_plan import by_planes


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, twice: ``staged`` with its manifest, and ``stock`` as one safetensors file."""

    staged: Path
    stock: Path
    manifest: Manifest
    plan: StagePlan
    provenance: dict[str, Any]


def served_checkpoint(profile: Profile, served: ServedModel | None = None) -> Checkpoint:
    """The served model of ``profile`` under its stage plan, with the adapters of its best recipe, in the cache.

    Raises StageError when the model has no adapter for a stage, and what staging raises.
    """
    config = profile.section("served", ServedConfig)
    served = served or load_served(profile)
    adapters = stage_adapters(config, best_recipe(profile))
    return _write(served_source(served), served.plan, _name(served), served.provenance, adapters)


def random_checkpoint(shape: str, dtype: Any, block: int, seed: int) -> Checkpoint:
    """Random weights of a named shape, its last but one ``block`` layers deferred; for timing, and without adapters."""
    source = RandomSource(shape, dtype, seed)
    depth = source.config.num_hidden_layers
    plan = StagePlan.from_block(depth, range(depth - 1 - block, depth - 1))
    provenance = {"source": f"random:{shape}, seed {seed}", "sha256": None, "kind": "random", "note": "timing only"}
    return _write(source, plan, f"random-{shape}-{name_of(dtype)}-{seed}", provenance, {})


def bare_checkpoint(served: ServedModel) -> Checkpoint:
    """The served model under its stage plan without adapters."""
    return _write(served_source(served), served.plan, _name(served), served.provenance, {})


def whole_checkpoint(served: ServedModel) -> Checkpoint:
    """The served model in one stage: what a plain start loads, layer after layer."""
    source, parent = served_source(served), paths.CACHE / "checkpoints"
    folder = parent / f"{_name(served)}-whole"
    manifest = write_staged(source, whole(source.names, served.plan.depth), folder)
    stock = write_stock(source, parent / f"{_name(served)}-stock")
    return Checkpoint(folder, stock, manifest, served.plan, served.provenance)


def stored_source(served: ServedModel, stored: torch.dtype) -> ModelSource:
    """The served model with its weights in ``stored``."""
    origin = Origin(str(served.provenance["source"]), served.sha256, "real")
    return ModelSource(served.model, served.tokenizer, origin, stored)


def planes_checkpoint(served: ServedModel, stored: torch.dtype, split: str) -> Checkpoint:
    """The served model in ``stored``, every matrix cut by ``split``, all layers in each stage."""
    source, parent = stored_source(served, stored), paths.CACHE / "checkpoints"
    name = f"{served.sha256[:12]}-{name_of(stored)}"
    plan = by_planes(source.shapes, PlanSpec(split))
    folder = parent / f"{name}-planes-{split.replace(' ', '-')}"
    manifest = write_staged(source, plan, folder)
    return Checkpoint(folder, write_stock(source, parent / f"{name}-stock"), manifest, served.plan, served.provenance)


def _name(served: ServedModel) -> str:
    """Weights and the dtype they are written in: a folder made where another one computes holds the same."""
    return f"{served.sha256[:12]}-{name_of(served.stored or served.model.dtype)}"


def _write(
    source: TensorSource, plan: StagePlan, name: str, provenance: dict[str, Any], adapters: dict[int, Path]
) -> Checkpoint:
    parent = paths.CACHE / "checkpoints"
    healed = "healed" if adapters else "bare"
    folder = parent / f"{name}-{plan.block[0]}-{plan.block[-1]}-{healed}"
    manifest = write_staged(source, staged(source.names, plan), folder, adapters)
    return Checkpoint(folder, write_stock(source, parent / f"{name}-stock"), manifest, plan, provenance)


def write_stock(source: TensorSource, folder: Path) -> Path:
    """One safetensors file and its config, as models are published; a folder that is there is left as it is."""
    if folder.exists():
        return folder
    draft = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        source.write_side_files(draft)
        tensors = {name: source.get(name).contiguous() for name in source.names}
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def prompt_of(profile: Profile, questions: str) -> str:
    """The first test question of ``questions`` with its passage; "" for random weights, which have no tokenizer."""
    if profile.model.startswith(RANDOM):
        return ""
    item = load_qa(questions, "test")[0]
    return qa_prompt(item.passage, item.question)
