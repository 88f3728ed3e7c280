"""A stage of a checkpoint as a view of the engine: its layers as they are, or fused once nothing will change them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from firsttoken.engine.decoder import Decoder, LocalSegment
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.model_version import Transition as EngineTransition
from firsttoken.progressiveserve.loading.views import StageView
from firsttoken.progressiveserve.staged_serving.transitions import Transition

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedModelVersion(ModelVersion):
    """``modules`` of ``model`` as a view; its requests keep what ``policy`` will need to move on."""

    def __init__(self, model: PreTrainedModel, modules: StageView, policy: Transition) -> None:
        modules.activate(model)
        kept = policy.keep(modules)
        super().__init__(
            Decoder(model, [LocalSegment(modules.layers)]), HiddenStateCache(kept) if kept else None, modules.stage
        )
        self.modules = modules

    def fuse(self) -> Iterator[None]:
        """Fuse as any view does. It is then the last of its model: nothing can be compared with it."""
        del self.modules
        return super().fuse()


def moving(policy: Transition) -> EngineTransition:
    """``policy`` as the engine asks it."""
    return lambda old, new: policy.redo(old.modules, new.modules)
