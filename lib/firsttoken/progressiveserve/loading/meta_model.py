"""The model of a staged checkpoint before its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from firsttoken.assets.empty_model import build_on_meta
from firsttoken.progressiveserve.checkpoint.completeness import check_complete
from firsttoken.progressiveserve.checkpoint.manifest import CONFIG, Manifest, check_side
from firsttoken.progressiveserve.loading.merges import Merges
from firsttoken.progressiveserve.loading.tensor_placement import Build, torch_dtype, untied_shapes
from firsttoken.progressiveserve.loading.views import StageView, make_view
from firsttoken.progressiveserve.passlayer import PassLayer


class MetaModel:
    """The model of a staged checkpoint with no weights yet, and its layers by index whether they compute or not.

    It computes in ``dtype``, or as it is stored; what arrives is converted as it is put in its place. ``build`` makes
    the stock model, or the lean one (``lean.build.build_lean``). Raises ModelError for a config.json that is not
    the one that was staged, or describes another model than the manifest.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        build: Build = build_on_meta,
    ) -> None:
        check_side(folder, manifest, CONFIG)
        self.dtype = dtype or torch_dtype(manifest.dtype)
        self.model = build(folder, self.dtype)
        self.folder, self.device = folder, torch.device(device)
        self.model.model.rotary_emb.to(self.device)
        self.layers: list[nn.Module] = list(self.model.model.layers)
        self.merges = Merges()
        check_complete(folder, manifest, untied_shapes(self.model))

    def empty_view(self) -> StageView:
        """No layer has arrived."""
        inner = self.model.model
        ends = {"embed_tokens": inner.embed_tokens, "norm": inner.norm, "lm_head": self.model.lm_head}
        return make_view(0, [PassLayer() for _ in self.layers], ends)

    def release(self) -> None:
        """Let go of the layers: the views that there are keep theirs, and no other can be made."""
        self.layers.clear()
        self.model.model.layers = nn.ModuleList()
