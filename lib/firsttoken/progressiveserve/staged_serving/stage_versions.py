"""A stage of a checkpoint as a view of the engine: its layers as they are, or fused, beside those that later stages
take or in their place once nothing will change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from firsttoken.engine.accelerator import Fused, accelerator
from firsttoken.engine.attention import is_stock
from firsttoken.engine.compared_step import Comparison, check_rows, prompt_of, reference_rows
from firsttoken.engine.decoder import Decoder, LocalSegment
from firsttoken.engine.executor import Transition as EngineTransition
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.model_version import ModelVersion
from firsttoken.progressiveserve.checkpoint.manifest import CONFIG, MANIFEST
from firsttoken.progressiveserve.loading.views import StageView
from firsttoken.progressiveserve.staged_serving.transitions import Transition

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from firsttoken.engine.live_executor import LiveExecutor


Between = Callable[[Callable[[], None]], None]
"""Lets the engine's thread call something between two steps."""
FusedBeside = dict[int, tuple[nn.Module, Fused]]
"""By number, a plain layer and the same fused in memory of its own, without an adapter."""


class StagedModelVersion(ModelVersion):
    """``modules`` of ``model`` as a view; its requests keep what ``policy`` will need to move on."""

    def __init__(self, model: PreTrainedModel, modules: StageView, policy: Transition) -> None:
        modules.activate(model)
        boundaries = policy.keep(modules)
        super().__init__(
            Decoder(model, [LocalSegment(modules.layers)]),
            HiddenStateCache(boundaries) if boundaries else None,
            modules.stage,
        )
        self.modules = modules

    def compare(self, executor: LiveExecutor, between: Between, folder: Path, last: bool) -> None:
        """Hold a step of this stage of the model in ``folder`` to the model's own modules ``between`` two steps of
        ``executor``, unless it was before. Of a lean model only the ``last`` stage is: requests are open meanwhile.

        Raises ModelError for another model.
        """
        model, dtype = executor.model, executor.pool.shape.dtype
        files = folder / CONFIG, folder / MANIFEST
        comparison = Comparison(files, self.modules.stage, str(dtype), executor.pool.device.type)
        if not comparison.due or not (is_stock(model) or last):
            return

        def compare() -> None:
            prompt = prompt_of(executor.limits)
            with executor.stock_attention():
                reference = reference_rows(model, prompt)
            check_rows(folder.name, partial(executor.rows_of, prompt, self), reference, dtype)
            comparison.mark_passed()

        between(compare)

    def fuse_beside(self, fused: FusedBeside) -> Iterator[None]:
        """Put fused layers with the stage's adapter in the place of those that are here, one after another: a token of
        stage 1 of SmolLM2-135M takes 11 instead of 36 ms (two cores, bf16).

        Those that ``fused`` has are only given the adapter, and new ones are added to it. The plain layers stay as they
        are, for the stages to come. A layer that cannot be fused with its adapter computes as before.
        """
        (segment,) = self.decoder.segments
        for number, plain in enumerate(self.modules.base):
            if isinstance(segment.modules[number], Fused):
                continue
            if number not in fused or fused[number][0] is not plain:
                if not accelerator().fuses(plain):
                    continue
                fused[number] = plain, accelerator().fuse_layer(plain)
            self._use(segment, number, fused[number][1])
            yield

    def use_fused(self, fused_beside: FusedBeside) -> None:
        """Put the fused layers of ``fused_beside`` in the place of those that are here, with the stage's adapter, and
        no other."""
        (segment,) = self.decoder.segments
        for number, (plain, fused) in fused_beside.items():
            if self.modules.base[number] is plain:
                self._use(segment, number, fused)

    def _use(self, segment: LocalSegment, number: int, fused: Fused) -> None:
        slices = self.modules.adapter.layers.get(number) if self.modules.adapter else None
        adapted = fused if slices is None else fused.with_adapter(slices)
        if adapted is not None:
            segment.modules[number] = adapted

    def fuse(self) -> Iterator[None]:
        """Fuse as any view does. It is then the last of its model: nothing can be compared with it."""
        del self.modules
        return super().fuse()


def moving(policy: Transition) -> EngineTransition:
    """Return ``policy`` in the form that the engine asks."""
    return lambda old, new: policy.redo(old.modules, new.modules)
