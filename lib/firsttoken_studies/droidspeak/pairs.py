"""The sender and the receiver of a pair: any two models of one architecture, named in the profile.

A name is "base" (the profile's model), an adapter under ``data/adapters``, merged at load, or whatever ``load_model``
knows: a folder, a Hub id. So the paper's own pairs (Table 1) need no other code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.adapter_files import WEIGHTS, TunedFrom, check_plain, made_from
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.lock import file_sha256
from firsttoken.assets.models import PINNED, as_stored, load_model
from firsttoken.droidspeak.identity import ModelIdentity, check_compatible, identify
from firsttoken.study import paths
from firsttoken.study.errors import ModelError, ProfileError
from firsttoken.study.profile import Profile

BASE = "base"
HALF = "half"  # what the name of an adapter begins with that belongs to every second layer of the base


@dataclass(frozen=True)
class Pair:
    """A receiver and the sender whose cache it uses, by name."""

    receiver: str
    sender: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """ "receiver <- sender". Raises ProfileError for anything else."""
        receiver, arrow, sender = (part.strip() for part in text.partition("<-"))
        if not (receiver and arrow and sender):
            raise ProfileError(f"pair {text!r}: write it as 'receiver <- sender'")
        return cls(receiver, sender)

    def __str__(self) -> str:
        return f"{shown(self.receiver)} <- {shown(self.sender)}"


def shown(name: str) -> str:
    """``name`` as results have it: of a folder its last part, because where it lies is nobody else's business."""
    return Path(name).name if name.startswith(("/", ".", "~")) else name


@dataclass(frozen=True)
class PairedModel:
    """One model of a pair; ``weights`` and ``adapter`` are the hashes of its files ("" where there is none)."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    weights: str
    adapter: str
    provenance: dict[str, Any]

    @cached_property
    def identity(self) -> ModelIdentity:
        """Return the identity under which the model's caches are stored."""
        return identify(self.model, self.tokenizer, self.weights, self.adapter)

    def check_sender(self, sender: PairedModel) -> None:
        """Raise CacheError unless this model can use the cache of ``sender``, naming what differs."""
        check_compatible(sender.identity, self.identity)


class Models:
    """Models by name, each loaded once, in the profile's dtype and on its device; ``adapters`` as in the profile."""

    def __init__(self, profile: Profile, adapters: str) -> None:
        self._profile, self._folder = profile, adapters_folder(adapters)
        self._loaded: dict[str, PairedModel] = {}

    @property
    def provenance(self) -> dict[str, Any]:
        """The provenance of each model that was loaded."""
        return {shown(name): variant.provenance for name, variant in self._loaded.items()}

    def spec(self, name: str) -> str:
        """Return the name by which ``load_model`` loads the model that ``name`` begins from. Raises ModelError where
        there is no such model."""
        if name == BASE or (self._folder / name / WEIGHTS).is_file():
            return self._profile.model
        if re.fullmatch(r"[\w-]+", name) and name != PINNED and not Path(name).is_dir():
            raise ModelError(
                f"{name!r} is no adapter in {self._folder} and no model; train it (firsttoken measure reuse_training), "
                "or name a folder or a Hub id"
            )
        return name

    def load(self, name: str) -> PairedModel:
        """The model called ``name``. Raises ModelError as ``load_model`` does, or for an adapter of another base."""
        if name not in self._loaded:
            folder = self._folder / name
            is_adapter = (folder / WEIGHTS).is_file()
            self._loaded[name] = self._merged(name, folder) if is_adapter else self._plain(name)
        return self._loaded[name]

    def _plain(self, name: str) -> PairedModel:
        spec, profile = self.spec(name), self._profile
        loaded = load_model(spec, dtype=profile.torch_dtype(), device=profile.torch_device(), seed=profile.seed)
        model = as_stored(loaded.model, profile.stored_dtype(), profile.torch_dtype())
        provenance = loaded.provenance
        return PairedModel(
            name, model, loaded.tokenizer, provenance.sha256 or provenance.source, "", provenance.as_dict()
        )

    def _merged(self, name: str, folder: Path) -> PairedModel:
        """The base with an adapter merged, in fp32 before it is rounded: in 16 bits small changes would be lost."""
        base = load_model(self._profile.model, dtype=torch.float32)
        recipe, provenance = made_from(folder, TunedFrom), base.provenance
        if recipe.base_sha256 != provenance.sha256:
            raise ModelError(
                f"adapter {name} belongs to the base {recipe.base_sha256[:12]}, not "
                f"{str(provenance.sha256)[:12]}: train it for this one (firsttoken measure reuse_training)"
            )
        model = half_the_layers(base.model) if name.startswith(HALF) else base.model
        check_plain(folder, f"adapter {name}")
        model = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
        model = as_stored(model, self._profile.stored_dtype(), self._profile.torch_dtype())
        model = model.to(self._profile.torch_device())
        adapter = file_sha256(folder / WEIGHTS)
        note = f"adapter {name} merged ({adapter[:12]}), tuned to {', '.join(recipe.tasks)}"
        identity = provenance.as_dict() | {"dtype": self._profile.dtype_name}
        identity["note"] = f"{identity['note']}; {note}"
        return PairedModel(
            name, model.eval().requires_grad_(False), base.tokenizer, provenance.sha256 or "", adapter, identity
        )


def adapters_folder(name: str) -> Path:
    """Return the folder of a profile's adapters; ``name`` is a folder below data/adapters, or a path."""
    return paths.ADAPTERS / name  # an absolute path stays what it is


def half_the_layers(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with its layers 0, 2, 4, ... alone, in place: the smaller model of the comparison (DroidSpeak, 5.6)."""
    kept_layers = layers_of(model)[::2]
    for index, layer in enumerate(kept_layers):
        layer.self_attn.layer_idx = index
    model.get_decoder().layers = kept_layers
    model.config.num_hidden_layers = len(kept_layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[::2]
    return model


def weight_distance(receiver: nn.Module, sender: nn.Module) -> float:
    """Return the distance of two models of one shape: |receiver - sender| / |sender| over the weights of all layers."""
    pairs = [_squares(a, b) for a, b in zip(layers_of(receiver), layers_of(sender), strict=True)]
    return (sum(away for away, _ in pairs) / sum(size for _, size in pairs)) ** 0.5


def _squares(receiver: nn.Module, sender: nn.Module) -> tuple[float, float]:
    """The squared norms of the difference and of the sender."""
    away = size = 0.0
    for a, b in zip(receiver.parameters(), sender.parameters(), strict=True):
        away += (a.double() - b.double()).square().sum().item()
        size += b.double().square().sum().item()
    return away, size
