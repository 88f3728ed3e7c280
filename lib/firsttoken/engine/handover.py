"""An engine goes on where a :class:`NumpyModel` is: with its packed weights, and with the cache of its request."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from firsttoken.assets.empty_model import put
from firsttoken.engine.decoder import LocalSegment
from firsttoken.engine.fused import FusedLayer
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.native.linear import NativeLinear
from firsttoken.engine.numpy_model import BLOCK_TOKENS, NumpyModel
from firsttoken.lean.build import lean_on_meta
from firsttoken.study import dtypes


def take_over(model: NumpyModel, blocks: int) -> LiveExecutor:
    """What runs the weights of ``model``, all of which it has read, over a pool of ``blocks`` KV blocks.

    The packed weights are the same memory; what is small is copied, and so is the embedding, as its file may change.
    Whoever looks for the layers of its plain model finds none with weights: the executor's version has them, fused.
    """
    lean = lean_on_meta(model.files.folder, dtypes.named(model.dtype))
    for name in model.small:
        put(lean, name, _tensor(model, model.parameter(name).copy()))
    lean.tie_weights()
    layers = zip(lean.model.layers, model.panels, strict=True)
    segment = LocalSegment([FusedLayer(layer, panels) for layer, panels in layers])
    executor = LiveExecutor(
        lean, blocks, block_tokens=BLOCK_TOKENS, segments=[segment], device=torch.device("cpu"), touched=False
    )
    lean.model.layers = nn.ModuleList()  # which have no weights
    executor.version.decoder.set_head(NativeLinear([lean.lm_head], panels=model.head))
    return executor


def _tensor(model: NumpyModel, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).view(dtypes.named(model.dtype))


class CacheSource:
    """The cache of ``model``, as a source of how a request begins: there at once, and copied layer by layer."""

    redo = range(0)
    complete = True

    def __init__(self, model: NumpyModel) -> None:
        self._model, self.tokens, self._told = model, model.cached, False

    def begin(self) -> None:
        """Do nothing: it is here."""

    def hidden_states(self) -> None:
        """None: no layer is computed again."""

    def arrived(self) -> list[tuple[int, Tensor]]:
        """All layers, the first time that it is asked."""
        if self._told:
            return []
        self._told = True
        rows = _tensor(self._model, self._model.cache[: -(-self.tokens // BLOCK_TOKENS)])
        blocks, layers, _, block_tokens, heads, width = rows.shape
        laid = rows.permute(1, 2, 4, 0, 3, 5).reshape(layers, 2, 1, heads, blocks * block_tokens, width)
        return list(enumerate(laid))

    def close(self) -> None:
        """Do nothing: the model keeps its cache."""
