"""The checkpoint that cold starts load: one model, staged and as one stock file, made once and kept in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from safetensors.torch import save_file

from firsttoken.assets.corpora import load_qa
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_served
from firsttoken.progressiveserve.checkpoint.manifest import Manifest
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, TensorSource, by_layers, single_stage, staged
from firsttoken.progressiveserve.checkpoint.sources import RandomSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.samples import qa_prompt
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.progressiveserve.staging import RANDOM, best_recipe, served_source, stage_adapters
from firsttoken.study import paths
from firsttoken.study.dtypes import name_of
from firsttoken.study.files import new_folder
from firsttoken.study.profile import Profile
from firsttoken_extras.bitplanes.plane_plan import PlaneOrder, by_planes

LayerGroups: TypeAlias = Callable[[int, Sequence[int]], Sequence[Sequence[int]]]
"""The number of layers, and the block that waits (0-based) -> the layers that each stage brings."""


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, twice: ``staged`` with its manifest, and ``stock`` as one safetensors file."""

    staged: Path
    stock: Path
    manifest: Manifest
    plan: StagePlan
    provenance: dict[str, Any]


@contextmanager
def checkpoint_root(private: bool) -> Iterator[Path]:
    """The folder of staged checkpoints: the one in the cache, which runs share; or a ``private`` one on the same disk
    and for the time of the block, for what a reader's mechanism stages."""
    if private:
        paths.CACHE.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="private-checkpoints-", dir=paths.CACHE) as folder:
            yield Path(folder)
    else:
        yield paths.CACHE / "checkpoints"


def served_checkpoint(profile: Profile, served: ServedModel | None = None) -> Checkpoint:
    """The served model of ``profile`` under its stage plan, with the adapters of its best recipe, in the cache.

    Raises StageError when the model has no adapter for a stage, and what staging raises.
    """
    config = profile.section("served", ServedConfig)
    served = served or load_served(profile)
    adapters = stage_adapters(config, best_recipe(profile))
    return _by_stage(served_source(served), served.plan, _name(served), served.provenance, adapters)


def grouped_checkpoint(profile: Profile, served: ServedModel, groups: LayerGroups, root: Path) -> Checkpoint:
    """The served model as :func:`served_checkpoint` has it, in a folder in ``root``, its layers in a reader's
    ``groups``, one a stage. A stage has its adapter where that was trained with the layers that are there."""
    source, plan = served_source(served), served.plan
    order = by_layers(source.names, groups(plan.depth, plan.block))
    adapters = stage_adapters(profile.section("served", ServedConfig), best_recipe(profile)).items()
    fitting = {
        stage: folder
        for stage, folder in adapters
        if stage <= len(order.stages) and order.layers(stage) == plan.present(stage)
    }
    return written(source, order, _name(served), "grouped", plan, served.provenance, fitting, root)


def random_checkpoint(shape: str, dtype: Any, block: int, seed: int) -> Checkpoint:
    """Random weights of a named shape, its last but one ``block`` layers deferred; for timing, and without adapters."""
    source = RandomSource(shape, dtype, seed)
    depth = source.config.num_hidden_layers
    plan = StagePlan.from_block(depth, range(depth - 1 - block, depth - 1))
    provenance = {"source": f"random:{shape}, seed {seed}", "sha256": None, "kind": "random", "note": "timing only"}
    return _by_stage(source, plan, f"random-{shape}-{name_of(dtype)}-{seed}", provenance, {})


def bare_checkpoint(served: ServedModel) -> Checkpoint:
    """The served model under its stage plan without adapters."""
    return _by_stage(served_source(served), served.plan, _name(served), served.provenance, {})


def whole_checkpoint(served: ServedModel) -> Checkpoint:
    """The served model in one stage: what a plain start loads, layer after layer."""
    source = served_source(served)
    order = single_stage(source.names, served.plan.depth)
    return written(source, order, _name(served), "whole", served.plan, served.provenance)


def planes_checkpoint(served: ServedModel, split: str, order: PlaneOrder, root: Path) -> Checkpoint:
    """The served model, every matrix cut by ``split``, its planes in this ``order``, in a folder in ``root``."""
    source = served_source(served)
    plan, ending = by_planes(source.shapes, split, order), f"planes-{split.replace(' ', '-')}"
    return written(source, plan, _name(served), ending, served.plan, served.provenance, root=root)


def _name(served: ServedModel) -> str:
    """Weights and the dtype they are written in: a folder made where another one computes holds the same."""
    return f"{served.sha256[:12]}-{name_of(served.stored or served.model.dtype)}"


def _by_stage(
    source: TensorSource, plan: StagePlan, name: str, provenance: dict[str, Any], adapters: dict[int, Path]
) -> Checkpoint:
    ending = f"{plan.block[0]}-{plan.block[-1]}-{'healed' if adapters else 'bare'}"
    return written(source, staged(source.names, plan), name, ending, plan, provenance, adapters)


def written(
    source: TensorSource,
    order: LoadPlan,
    name: str,
    ending: str,
    plan: StagePlan,
    provenance: dict[str, Any],
    adapters: dict[int, Path] | None = None,
    root: Path | None = None,
) -> Checkpoint:
    """Write ``source`` to the cache, or to ``root``, in the ``order`` of a load plan as the folder "name-ending", and
    to the cache as one file in another folder that all orders of ``name`` share. Files that are there already stay as
    they are."""
    cached = paths.CACHE / "checkpoints"
    folder = (root or cached) / f"{name}-{ending}"
    manifest = write_staged(source, order, folder, adapters)
    return Checkpoint(folder, write_stock(source, cached / f"{name}-stock"), manifest, plan, provenance)


def write_stock(source: TensorSource, folder: Path) -> Path:
    """One safetensors file and its config, as models are published; a folder that is there is left as it is."""
    if folder.exists():
        return folder
    with new_folder(folder) as draft:
        source.write_side_files(draft)
        tensors = {name: source.get(name).contiguous() for name in source.names}
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompt_of(profile: Profile, questions: str) -> str:
    """The first test question of ``questions`` with its passage; "" for random weights, which have no tokenizer."""
    if profile.model.startswith(RANDOM):
        return ""
    item = load_qa(questions, "test")[0]
    return qa_prompt(item.passage, item.question)
