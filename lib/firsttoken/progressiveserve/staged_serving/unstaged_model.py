"""A Hugging Face folder that was not staged: the whole model as one stage, lean or read by transformers itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from firsttoken.assets.checkpoint import stored_dtype, weight_files
from firsttoken.assets.servable import check_servable
from firsttoken.lean.lean_config import OtherWay, lean_config
from firsttoken.progressiveserve.staged_serving.stage_loader import Growth, files_alone
from firsttoken.study import dtypes
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.system.direct_io import read_ahead

if TYPE_CHECKING:
    import torch
    from torch import nn

    from firsttoken.progressiveserve.loading.views import StageView


class Whole:
    """A model that is there, as what a load leaves behind: skeleton and load in one."""

    failure: Exception | None = None

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        import torch

        from firsttoken.assets.decoder_layers import layers_of
        from firsttoken.assets.held import hold
        from firsttoken.progressiveserve.loading.merges import Merges
        from firsttoken.progressiveserve.loading.views import make_view

        self.model = hold(_loaded(folder, dtype, device))
        self.device = torch.device(device)
        self.merges = Merges()  # nothing of it is still to come
        layers, inner = layers_of(self.model), self.model.model
        ends = {"embed_tokens": inner.embed_tokens, "norm": inner.norm, "lm_head": self.model.lm_head}
        self.view = make_view(1, list(layers), ends)

    def streaming(self) -> AbstractContextManager[None]:
        """Nothing has to be waited for."""
        return nullcontext()

    def wait(self) -> StageView:
        """Return the view at once: it is there."""
        return self.view

    def close(self) -> None:
        """Nothing is under way."""

    def release(self) -> None:
        """Let go of the layers and the view, as :meth:`Skeleton.release` does."""
        from torch import nn

        self.model.model.layers = nn.ModuleList()
        del self.view


def _loaded(folder: Path, dtype: torch.dtype, device: str) -> nn.Module:
    """Lean layers, or what transformers makes of a folder that asks for more."""
    try:
        lean_config(folder)
    except OtherWay as reason:
        print(f"firsttoken: {folder.name} starts with transformers' own modules: {reason}", file=sys.stderr)
        from firsttoken.assets.models import load_model

        return load_model(str(folder), dtype=dtype, device=device, with_tokenizer=False).model
    from firsttoken.progressiveserve.loading.rival_loaders import load_with

    return load_with("lean", folder, dtype, device)


class PlainGrowth(Growth):
    """One stage, there or not. What its one load moves comes from this machine's files, over no link."""

    bytes_moved = 0

    def prepare(self) -> None:
        """Import all that computes, as any growth does, but not transformers, which only few folders ask for."""
        super().prepare()
        from firsttoken.progressiveserve.loading import rival_loaders  # noqa: F401

    def read_ahead(self) -> None:
        """Let the system bring the files into memory, which are mapped afterwards."""
        with suppress(FirstTokenError):
            for file in weight_files(self._folder):
                Thread(target=read_ahead, args=(file,), daemon=True).start()

    def first(self) -> Whole:
        """Read it all. Raises NoHope for a folder that cannot be read: no link brings it, so it stays as it is."""
        from firsttoken.assets.held import unchanged
        from firsttoken.progressiveserve.loading.tensor_placement import torch_dtype

        self.stages = 1
        with files_alone():
            files = check_servable(self._folder)
            self.bytes_total = files.bytes
            stored = torch_dtype(stored_dtype(self._folder))
        with unchanged(files.files), files_alone():
            self.skeleton = Whole(self._folder, dtypes.serving(self._dtype, stored, self._device), self._device)
        self.bytes_moved = self.bytes_total
        return self.skeleton

    def later(self, view: StageView) -> Iterator[StageView]:
        """Return no views: there are no later stages."""
        return iter(())
