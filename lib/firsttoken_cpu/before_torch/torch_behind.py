"""What an engine takes over of answers that began before torch was imported: the packed weights."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from firsttoken.study import dtypes
from firsttoken_cpu.before_torch.numpy_model import BLOCK_TOKENS, NumpyModel, as_tensor

if TYPE_CHECKING:
    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken_cpu.before_torch.numpy_weights import FolderWeights


def take_over(model: NumpyModel, blocks: int, host_blocks: int = 0) -> LiveExecutor:
    """Return an executor for the weights of ``model``, those of a plain folder, over a pool of ``blocks`` KV blocks,
    and as many of ``host_blocks`` in host memory.

    The packed weights are the same memory; what is small is read, and so is the embedding. Layers are in the executor's
    version, fused; its plain model has none. That version computes all that ``model`` computes with the same kernels,
    also where others are faster here.
    """
    import torch
    from torch import nn

    from firsttoken.assets.empty_model import set_parameter
    from firsttoken.engine.decoder import LocalSegment
    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken_cpu.fused import FusedLayer
    from firsttoken_cpu.lean.lean_model import lean_on_meta
    from firsttoken_cpu.native_attend import by_kernels

    weights: FolderWeights = model.weights
    plain = lean_on_meta(weights.files.folder, dtypes.named(model.dtype))
    for name in weights.small:
        set_parameter(plain, name, as_tensor(model, weights.parameter(name)))
    plain.tie_weights()
    layers = zip(plain.model.layers, weights.panels, strict=True)
    segment = LocalSegment([FusedLayer(layer, panels) for layer, panels in layers])
    options = {"block_tokens": BLOCK_TOKENS, "host_blocks": host_blocks, "device": torch.device("cpu")}
    executor = LiveExecutor(plain, blocks, segments=[segment], touched=False, **options)
    plain.model.layers = nn.ModuleList()
    head, executor.version.attend = by_kernels(plain.lm_head, weights.head().panels["head"])
    executor.version.decoder.set_head(head)
    threading.Thread(target=weights.packer.memory.collapse, name="huge pages", daemon=True).start()  # 5 ms a page
    return executor
