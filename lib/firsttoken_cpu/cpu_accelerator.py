"""The accelerator of CPUs, as the engine, stages and swarms ask it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from firsttoken.engine.accelerator import Accelerator, JoinedLayers
from firsttoken.engine.attention import Attend
from firsttoken.engine.kv import KVPool
from firsttoken.study.errors import NotLean
from firsttoken_cpu import fused
from firsttoken_cpu.before_torch.numpy_weights import NumpyWeights
from firsttoken_cpu.lean.lean_model import lean_on_meta
from firsttoken_cpu.native.library import NAMES, NativeLinear, kernels, multiplies_by_tiles
from firsttoken_cpu.native_attend import NativeAttend, TiledAttend, by_kernels, supports


class CPUAccelerator(Accelerator):
    """Own kernels on a CPU, oneDNN's packed weights where they are faster or there are none, and lean modules."""

    def build_own(self, folder: Path, dtype: torch.dtype) -> nn.Module | None:
        try:
            return lean_on_meta(folder, dtype)
        except NotLean as reason:
            print(f"firsttoken: {folder.name} starts with transformers' own modules: {reason}", file=sys.stderr)
            return None

    def fuse(self, model: nn.Module) -> nn.Module:
        return fused.fuse(model)

    def fuses(self, layer: nn.Module) -> bool:
        return fused.fuses(layer)

    def fuse_layer(self, layer: nn.Module, panels: Mapping[str, np.ndarray] | None = None) -> nn.Module:
        return fused.fuse_layer(layer) if panels is None else fused.FusedLayer(layer, panels)

    def pack(self, linear: nn.Module) -> nn.Module | None:
        return fused.packed(linear) if fused.packs(linear) else None

    def norm_before(self, head: nn.Module, norm: nn.Module) -> Callable[[Tensor], Tensor]:
        return partial(fused.normed, norm=norm) if type(head) is NativeLinear else norm

    def join(self, variants: Sequence[Sequence[nn.Module]]) -> tuple[int, JoinedLayers | None]:
        return fused.join(variants)

    def attention(self, pool: KVPool) -> type[Attend] | None:
        if not supports(pool.shape, pool.device):
            return None
        return TiledAttend if pool.shape.dtype == torch.bfloat16 and multiplies_by_tiles() else NativeAttend

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        plain = logits.device.type == "cpu" and logits.dtype in NAMES and logits.is_contiguous()
        if plain and len(logits) and (native := kernels()) is not None:
            return native.largest(logits)
        return super().argmax(logits)

    def multiplies(self, dtype: torch.dtype) -> bool:
        return (native := kernels()) is not None and dtype in native.multiplied

    def continuation(self, head: nn.Module, weights: NumpyWeights) -> tuple[nn.Module, type[Attend] | None]:
        return by_kernels(head, weights.head().panels["head"])
