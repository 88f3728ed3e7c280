"""Blocks that a link is still bringing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from firsttoken.engine.attention import page
from firsttoken.engine.work import Work
from firsttoken.link.shaped import Link
from firsttoken.petals.stack import BlockStack
from firsttoken.progressiveserve.checkpoint.manifest import Manifest
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.placement import build_lean
from firsttoken.progressiveserve.loading.skeleton import Skeleton
from firsttoken.progressiveserve.loading.views import make_view
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken_studies.combined.fetchers.division import only

if TYPE_CHECKING:  # a lean start needs none of it
    from transformers import PreTrainedModel


class FetchedStack(BlockStack):
    """``blocks`` of the staged checkpoint in ``folder``, of which ``link`` begins to bring them when this is made, and
    nothing else; a step waits until all are there. They are not fused: that would be later than the first token.

    Raises as ``StageLoad`` and ``BlockStack``; a step raises what ended the load.
    """

    def __init__(
        self,
        folder: Path,
        blocks: range,
        dtype: torch.dtype,
        kv_tokens: int,
        *,
        manifest: Manifest,
        link: Link,
        readers: int,
    ) -> None:
        self._manifest, self._link, self._readers = manifest, link, readers
        super().__init__(folder, blocks, dtype, kv_tokens)

    def run(self, layers: range, works: Sequence[Work], hidden: Sequence[Tensor]) -> list[Tensor]:
        """As ``BlockStack.run``, once all blocks are there."""
        self.load.wait()
        return super().run(layers, works, hidden)

    def measured_throughput(self) -> float:
        """Unknown, as nothing has been computed; who asks this server knows its address and compares it with none."""
        return 0.0

    def _span(self, blocks: range) -> PreTrainedModel:
        skeleton = Skeleton(self._folder, self._manifest, dtype=self.dtype, build=build_lean)
        nothing = make_view(0, [PassLayer() for _ in skeleton.layers], {})
        wanted, readers = only(self._manifest, blocks), self._readers
        self.load = StageLoad(self._folder, wanted, [1], [self._link], skeleton, nothing, threads=readers, verify=False)
        model, layers = skeleton.model, self.load.view.layers[blocks.start : blocks.stop]
        for number, layer in enumerate(layers):
            layer.self_attn.layer_idx = number
        model.model.layers = layers
        page(model)
        return model
