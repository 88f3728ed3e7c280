"""Views of a model: the list of layers that a stage computes with. Two stages may serve side by side, for they share
their weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from firsttoken.engine.lora import Adapter, with_adapter
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.study.errors import ModelError, StageError

if TYPE_CHECKING:  # a model of ours needs none of it
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StageView:
    """The modules of one stage of a model.

    ``base`` are the plain decoder layers, a PassLayer where one has not arrived; ``layers`` are those that compute,
    with the stage's ``adapter``; ``ends`` are "embed_tokens", "norm" and "lm_head".
    """

    stage: int
    base: tuple[nn.Module, ...]
    layers: nn.ModuleList
    ends: Mapping[str, nn.Module]
    adapter: Adapter | None = None

    def activate(self, model: PreTrainedModel) -> None:
        """Make ``model`` compute as this stage, from the next forward pass on."""
        model.model.layers = self.layers
        model.model.embed_tokens, model.model.norm = self.ends["embed_tokens"], self.ends["norm"]
        model.lm_head = self.ends["lm_head"]


def make_view(
    stage: int, base: list[nn.Module], end_modules: Mapping[str, nn.Module], adapter: Adapter | None = None
) -> StageView:
    """The view of ``stage``; each layer that ``adapter`` knows computes with its slice of it.

    Raises StageError for an adapter of a layer that does not compute, which PEFT drops without a word, or of another
    shape.
    """
    slices = adapter.layers if adapter else {}
    for i in sorted(slices):
        if i >= len(base) or isinstance(base[i], PassLayer):
            raise StageError(f"adapter {adapter.name} is for layer {i} too, which stage {stage} does not have")
    layers = [with_adapter(layer, slices[i]) if i in slices else layer for i, layer in enumerate(base)]
    return StageView(stage, tuple(base), nn.ModuleList(layers), dict(end_modules), adapter)


def check_loaded(view: StageView, layers: Collection[int]) -> None:
    """Raise ModelError unless ``view`` computes with exactly ``layers``, and each of its parameters has been
    written.

    Else it may not serve.
    """
    present = {i for i, layer in enumerate(view.base) if not isinstance(layer, PassLayer)}
    if wrong_layers := sorted(present ^ set(layers)):
        kind = "computes with" if wrong_layers[0] in present else "lacks"
        raise ModelError(
            f"stage {view.stage} {kind} layer {wrong_layers[0]}, and its manifest says otherwise; stage it again"
        )
    modules = {f"layer {i}": layer for i, layer in enumerate(view.layers)} | dict(view.ends)
    for owner, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise ModelError(f"stage {view.stage}: {name} of {owner} was never brought; stage it again")


def changed(old: StageView, new: StageView) -> range:
    """Return the first (0-based) to the last layer that compute differently in ``new``: those below stay right.

    All layers where the embedding changed; none where only the norm or the head did, or nothing.
    """
    if old.ends["embed_tokens"] is not new.ends["embed_tokens"]:
        return range(len(new.layers))
    places = [i for i, (a, b) in enumerate(zip(old.layers, new.layers, strict=True)) if a is not b]
    return range(places[0], places[-1] + 1) if places else range(0)
