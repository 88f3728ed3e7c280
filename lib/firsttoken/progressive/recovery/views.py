"""A stage of a checkpoint as a view of the engine: its layers as they are, or fused once nothing will change them."""

from __future__ import annotations

from transformers import PreTrainedModel

from firsttoken.engine.decoder import Decoder
from firsttoken.engine.edges import Edges
from firsttoken.engine.fused import fuse_layer
from firsttoken.engine.segments import LocalSegment
from firsttoken.engine.views import Transition as Redo
from firsttoken.engine.views import View
from firsttoken.progressive.loading.loader import Skeleton
from firsttoken.progressive.loading.views import StageView
from firsttoken.progressive.recovery.transitions import NOTHING, Transition


class GrownView(View):
    """``modules`` of ``model`` as a view; its requests keep what ``policy`` will need to move on."""

    def __init__(self, model: PreTrainedModel, modules: StageView, policy: Transition) -> None:
        modules.activate(model)
        kept = policy.keep(modules)
        super().__init__(Decoder(model), Edges(kept) if kept else None, modules.stage)
        self.modules = modules


def fused(skeleton: Skeleton, modules: StageView) -> View:
    """``modules``, the last of ``skeleton``, in fewer and larger operations; no other view can be made of it later.

    The weights are there twice until the views of the unfused layers have no request left.
    """
    modules.activate(skeleton.model)
    view = View(Decoder(skeleton.model, [LocalSegment([fuse_layer(layer) for layer in modules.layers])]))
    view.stage = modules.stage
    skeleton.release()
    return view


def moving(policy: Transition) -> Redo:
    """``policy`` as the engine asks it. One stage under another view changes no key and no value."""

    def redo(old: GrownView, new: GrownView) -> range | None:
        return NOTHING if old.stage == new.stage else policy.redo(old.modules, new.modules)

    return redo
