"""The served model and its stages: the base with the task adapter merged, layers passed, stage adapters attached.

SmolLM2 untuned answers in sentences, so its exact match says nothing about pruning; the model that is served is tuned
to the task first, by an adapter of its own that is merged at load. Every stage is judged against that model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.adapter_files import WEIGHTS, read_adapter
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.model_config import MOST_LAYERS
from firsttoken.assets.models import as_stored, load_model
from firsttoken.assets.needs import LAYERS, Need
from firsttoken.progressiveserve.passlayer import pass_layers, restore_layers
from firsttoken.progressiveserve.stage_adapters import check_fit, load_adapter
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study import paths
from firsttoken.study.errors import StageError
from firsttoken.study.parsing.schema import between
from firsttoken.study.profile import Profile


@dataclass(frozen=True)
class ServedConfig:
    """The block of layers that comes later, and the folder of the adapters.

    ``block_start`` and ``block_size`` name the removed layers, 0-based. ``adapters`` is a folder under
    ``data/adapters`` or a path; ``task_adapter`` is the one merged at load, "" for none (the report's case).
    """

    block_start: Annotated[int, between(0, MOST_LAYERS)]
    block_size: Annotated[int, between(0, MOST_LAYERS)]
    adapters: str
    task_adapter: str = ""

    def needs(self) -> list[Need]:
        """Require that the block lies in the model; the plan checks that a layer stays."""
        end = self.block_start + self.block_size
        return [Need("served.block_start + block_size", end, LAYERS, "move the block down, or make it smaller")]

    def plan(self, depth: int) -> StagePlan:
        """The stage plan for a model of ``depth`` layers."""
        return StagePlan.from_block(depth, range(self.block_start, self.block_start + self.block_size))

    @property
    def folder(self) -> Path:
        """The folder in which the adapters lie."""
        return paths.ADAPTERS / self.adapters  # an absolute path stays what it is

    def check_adapters(self, recipes: Iterable[str]) -> None:
        """Raise StageError where an adapter of ``recipes`` is missing or damaged, before a model is loaded for it."""
        for name in (f"{letters}-{recipe}" for recipe in recipes for letters in ("A", "AB")):
            read_adapter(self.folder / name)


@dataclass(frozen=True)
class ServedModel:
    """The full model that is served, with the hash that stage adapters are bound to.

    ``stored`` is the dtype that its weights were rounded to and its checkpoints are written in; None: the model's own.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    plan: StagePlan
    sha256: str
    provenance: dict[str, Any]
    stored: torch.dtype | None = None


def load_base(profile: Profile) -> ServedModel:
    """The model of ``profile`` as it is published, not tuned to any task."""
    config = profile.section("served", ServedConfig)
    loaded = load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
    as_stored(loaded.model, profile.stored_dtype(), profile.torch_dtype())
    provenance = loaded.provenance.as_dict()
    if loaded.tokenizer is None:
        raise StageError(f"model {profile.model} has no tokenizer, and quality needs real text: choose another model")
    plan = config.plan(len(layers_of(loaded.model)))
    return ServedModel(
        loaded.model, loaded.tokenizer, plan, str(provenance["sha256"]), provenance, profile.stored_dtype()
    )


def load_served(profile: Profile) -> ServedModel:
    """The model of ``profile`` with its task adapter, if it has one, merged in fp32 before it is rounded."""
    config = profile.section("served", ServedConfig)
    if not config.task_adapter:
        return load_base(profile)
    loaded = load_model(profile.model, dtype=torch.float32, device=profile.torch_device())
    depth, folder = len(layers_of(loaded.model)), config.folder / config.task_adapter
    check_fit(folder, range(depth), loaded.provenance.sha256)
    merged = PeftModel.from_pretrained(loaded.model, str(folder)).merge_and_unload()
    weights = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    sha256 = hashlib.sha256(f"{loaded.provenance.sha256}+{weights}".encode()).hexdigest()
    model = as_stored(merged, profile.stored_dtype(), profile.torch_dtype()).eval().requires_grad_(False)
    provenance = loaded.provenance.as_dict() | {"dtype": profile.dtype_name, "task_adapter_sha256": weights}
    return ServedModel(model, loaded.tokenizer, config.plan(depth), sha256, provenance, profile.stored_dtype())


@contextmanager
def passing(model: PreTrainedModel, layers: tuple[int, ...]) -> Iterator[PreTrainedModel]:
    """``model`` with ``layers`` passed inside the block, and whole again after it."""
    removed = pass_layers(model, layers)
    try:
        yield model
    finally:
        restore_layers(model, removed)


@contextmanager
def at_stage(served: ServedModel, stage: int, adapter: Path | None = None) -> Iterator[PreTrainedModel]:
    """The served model as a client meets it in ``stage``, with the adapter of that stage if one is named.

    Leaving the block takes the adapter off and puts the layers back: the weights are again those of the full model.
    """
    with passing(served.model, served.plan.missing(stage)) as model:
        if adapter is None:
            yield model
            return
        peft = load_adapter(model, adapter, served.plan.present(stage), served.sha256)
        try:
            yield peft.get_base_model()
        finally:
            peft.unload()
