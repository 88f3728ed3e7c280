"""The model of a staged checkpoint before its weights, and what refines them in place once they serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from firsttoken.assets.empty_model import build_on_meta
from firsttoken.progressiveserve.checkpoint.manifest import CONFIG, Manifest, check_complete, check_side
from firsttoken.progressiveserve.checkpoint.names import HEAD, torch_dtype
from firsttoken.progressiveserve.checkpoint.part_formats import PartRefiner, format_of
from firsttoken.progressiveserve.loading.views import StageView, make_view
from firsttoken.progressiveserve.passlayer import PassLayer


class MetaModel:
    """The model of a staged checkpoint with no weights yet, and its layers by index whether they compute or not.

    It computes in ``dtype``, or as it is stored; what arrives is converted as it is put in its place. ``build`` makes
    the model of a folder's config.json, in a dtype, without memory for its weights: the stock one, or the accelerator's
    own (``accelerator.build_model``). Raises ModelError for a config.json that is not the one that was staged, or
    describes another model than the manifest.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        build: Callable[[Path, torch.dtype], nn.Module] = build_on_meta,
    ) -> None:
        check_side(folder, manifest, CONFIG)
        self.dtype = dtype or torch_dtype(manifest.dtype)
        self.model = build(folder, self.dtype)
        self.folder, self.device = folder, torch.device(device)
        self.model.model.rotary_emb.to(self.device)
        self.layers: list[nn.Module] = list(self.model.model.layers)
        self.between: Callable[[Callable[[], None]], Any] = lambda change: change()
        """Calls a change of weights when nobody computes with them: at once, or, where an engine runs, between two of
        its steps."""
        self._refiners: dict[str, PartRefiner] = {}
        shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        if self.model.config.tie_word_embeddings:
            shapes.pop(HEAD, None)
        check_complete(folder, manifest, shapes)

    def empty_view(self) -> StageView:
        """Return the view of stage 0, in which no layer has arrived."""
        inner = self.model.model
        end_modules = {"embed_tokens": inner.embed_tokens, "norm": inner.norm, "lm_head": self.model.lm_head}
        return make_view(0, [PassLayer() for _ in self.layers], end_modules)

    def refiner(self, name: str) -> PartRefiner:
        """Return the refiner of these weights by parts of the format ``name``, in place: the model is never there
        twice, and every view of it has the better weights as they come. A load that is tried again finds the same
        refiner."""
        if name not in self._refiners:
            self._refiners[name] = format_of(name).refiner(lambda change: self.between(change))
        return self._refiners[name]

    def release(self) -> None:
        """Drop the layers: the views that there are keep theirs, and no other can be made."""
        self.layers.clear()
        self.model.model.layers = nn.ModuleList()
