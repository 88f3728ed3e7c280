"""The model of a staged checkpoint before its weights, and what is merged into them in place once they serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from firsttoken.assets.empty_model import build_on_meta
from firsttoken.progressiveserve.checkpoint.manifest import CONFIG, Manifest, PartFile, check_complete, check_side
from firsttoken.progressiveserve.checkpoint.names import HEAD, torch_dtype
from firsttoken.progressiveserve.checkpoint.part_formats import WeightMerger, format_of
from firsttoken.progressiveserve.loading.views import StageView, make_view
from firsttoken.progressiveserve.passlayer import PassLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from firsttoken.lean.lean_model import LeanModel


class MetaModel:
    """The model of a staged checkpoint with no weights yet, and its layers by index whether they compute or not.

    It computes in ``dtype``, or as it is stored; what arrives is converted as it is put in its place. ``build`` makes
    the model of a folder's config.json, in a dtype, without memory for its weights: the stock one, or the lean one
    (``lean.build.build_lean``). Raises ModelError for a config.json that is not the one that was staged, or describes
    another model than the manifest.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        build: Callable[[Path, torch.dtype], PreTrainedModel | LeanModel] = build_on_meta,
    ) -> None:
        check_side(folder, manifest, CONFIG)
        self.dtype = dtype or torch_dtype(manifest.dtype)
        self.model = build(folder, self.dtype)
        self.folder, self.device = folder, torch.device(device)
        self.model.model.rotary_emb.to(self.device)
        self.layers: list[nn.Module] = list(self.model.model.layers)
        self.merges = Merges()
        shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        if self.model.config.tie_word_embeddings:
            shapes.pop(HEAD, None)
        check_complete(folder, manifest, shapes)

    def empty_view(self) -> StageView:
        """No layer has arrived."""
        inner = self.model.model
        ends = {"embed_tokens": inner.embed_tokens, "norm": inner.norm, "lm_head": self.model.lm_head}
        return make_view(0, [PassLayer() for _ in self.layers], ends)

    def release(self) -> None:
        """Let go of the layers: the views that there are keep theirs, and no other can be made."""
        self.layers.clear()
        self.model.model.layers = nn.ModuleList()


Merge = Callable[[], None]


class Merges:
    """What has been merged into the weights of one model.

    Merges are in place, so the model is never there twice: every view of it has the better weights as they come.
    ``between`` calls a merge when nobody computes with the weights: at once, or where an engine runs between two of its
    steps. ``spent`` are the bytes of weights that each of these calls changed, and the seconds that it took (on a GPU,
    until it was launched).
    """

    def __init__(self) -> None:
        self.between: Callable[[Merge], Any] = lambda merge: merge()
        self.spent: list[tuple[int, float]] = []
        self._mergers: dict[str, WeightMerger] = {}  # by format: a load that is tried again merges nothing twice

    def place(self, part: PartFile, file: memoryview, parameters: Callable[[str], nn.Parameter]) -> None:
        """Merge ``part``, whose ``file`` is there, into ``parameters``. Raises ModelError."""
        if part.format not in self._mergers:
            self._mergers[part.format] = format_of(part.format).merger(self.run)
        self._mergers[part.format].place(part, file, parameters)

    def run(self, merges: Sequence[Merge], size: int) -> None:
        """Let ``merges``, which change ``size`` bytes of weights, be called together between two steps."""
        self.between(partial(self._together, merges, size))

    def _together(self, merges: Sequence[Merge], size: int) -> None:
        begin = time.perf_counter()
        for merge in merges:
            merge()
        self.spent.append((size, time.perf_counter() - begin))
