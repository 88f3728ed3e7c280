"""Builds ``kernels.cpp`` once with the machine's C++ compiler, and calls it with tensors; linear layers that it runs.

Without a compiler, where it fails, or where the environment asks for torch alone, ``kernels`` is None and torch's own
operations do the work. Where it is built and its products are wrong, or oneDNN's are by tiles, oneDNN multiplies.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firsttoken.engine.accelerator import LoraPair
from firsttoken.study.errors import ModelError
from firsttoken.study.system.compiled import ONEDNN, TorchAlone, accelerator_name, say_once
from firsttoken_cpu.native.exports import (
    Exports,
    LayerStruct,
    PagedStruct,
    WeightStruct,
    load_exports,
    packed_adapter,
    panel_memory,
)

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Kernels:
    """The compiled functions. Tensors lie on the CPU, in one of ``NAMES``' dtypes; they are contiguous but ``query``
    and ``states`` of ``rotate``, whose tokens may be further apart."""

    def __init__(self, exports: Exports) -> None:
        self.exports = exports
        self.panel = exports.panel
        bf16 = exports.has_bfloat16 and not multiplies_by_tiles()
        self.multiplied = frozenset(
            dtype for dtype in [torch.float32, torch.bfloat16][: 1 + bf16] if _are_right(exports, NAMES[dtype])
        )

    def attend(
        self, query: Tensor, pool: Tensor, layer: int, tables: Tensor, sequences: Tensor, contexts: Tensor, scale: float
    ) -> Tensor:
        """Attention of ``query`` [tokens, heads, head_dim] over ``pool`` (``KVPool.rows``) -> the shape of ``query``.

        ``tables`` [sequences, blocks] are block tables; ``sequences`` and ``contexts`` [tokens] say whose table a token
        reads, and how many tokens it sees; all three are int64.
        """
        tokens, heads, width = query.shape
        out = query.new_empty(tokens, heads, width)
        paged = paged_struct(pool, tables, sequences, contexts)
        self._call("attend", query.dtype, query, query.stride(0), paged, out, heads // paged.kv_heads, layer, scale)
        return out

    def rms_norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """``states`` [..., width] over their root mean square, times ``weight`` [width]."""
        out, width = torch.empty_like(states), states.shape[-1]
        self._call("rms_norm", states.dtype, states, weight, out, states.numel() // width, width, epsilon)
        return out

    def gated(self, states: Tensor) -> Tensor:
        """silu of the first half of ``states`` [..., 2 * width], times the second half -> [..., width]."""
        width = states.shape[-1] // 2
        out = states.new_empty(*states.shape[:-1], width)
        self._call("gated", states.dtype, states, out, out.numel() // width, width)
        return out

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate ``states`` [tokens, heads, head_dim] in place by ``cos`` and ``sin`` [tokens, head_dim]."""
        self._call("rotate", states.dtype, states, states.stride(0), cos, sin, *states.shape)

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of each of ``rows`` [count, width]: its index, the first of equals, int64 [count], and itself,
        float32 [count]; a NaN where the row has one."""
        count, width = rows.shape
        indices, values = torch.empty(count, dtype=torch.int64), torch.empty(count)
        self._call("largest", rows.dtype, rows, count, width, indices, values)
        return indices, values

    def pack(self, rows: Tensor, weight: WeightStruct) -> None:
        """Write ``rows`` [outputs, inputs] to the panels of ``weight``."""
        self._call("pack", rows.dtype, rows, weight)

    def product(self, rows: Tensor, weight: WeightStruct, other: Tensor | None, out: Tensor) -> Tensor:
        """``rows`` [..., inputs] times ``weight``; ``other``, of the shape of ``out`` [..., width], is added if given.

        Returns ``out``."""
        self._call("product", rows.dtype, rows, rows.numel() // rows.shape[-1], weight, other, out)
        return out

    def run_layers(
        self,
        layers: ctypes.Array[LayerStruct],
        variant_of: Tensor | None,
        states: Tensor,
        rotary: tuple[Tensor, Tensor],
        paged: PagedStruct,
        scratch: int,
        epsilon: float,
        scale: float,
        variants: int = 1,
    ) -> None:
        """Decoder layers over ``states`` [tokens, hidden], in place; their keys and values go into the pool of
        ``paged``.

        ``layers`` [variants, layers] are of ``variants`` that differ in adapters alone; ``variant_of`` int64 [tokens]
        says to which one a token belongs, None that there is one. ``rotary`` are the positions' cosines and sines
        [tokens, head_dim], ``scratch`` the numbers that a token has between the products.
        """
        numbers = states.new_empty(len(states) * scratch)
        run = (layers, variants, variant_of, len(layers) // variants)
        self._call("run_layers", states.dtype, *run, states, *rotary, paged, numbers, epsilon, scale)

    def _call(self, name: str, dtype: torch.dtype, *arguments: Any) -> None:
        """Call the function ``name`` for ``dtype`` with as many threads as torch has."""
        self.exports.call(name, NAMES[dtype], *arguments, torch.get_num_threads())


def paged_struct(pool: Tensor, tables: Tensor, sequences: Tensor, contexts: Tensor) -> PagedStruct:
    """A step's tokens over ``pool`` (``KVPool.rows``), as :meth:`Kernels.attend` takes them."""
    _, _, _, block_tokens, kv_heads, width = pool.shape
    addresses = (tensor.data_ptr() for tensor in (pool, tables, sequences, contexts))
    return PagedStruct(*addresses, tables.shape[1], len(contexts), kv_heads, width, block_tokens, pool.stride(0))


def _are_right(exports: Exports, dtype: str) -> bool:
    """Return whether the products in ``dtype`` are right; says so where they are not."""
    if exports.multiplies(dtype):
        return True
    say_once(f"the engine's own {dtype} products are wrong on this processor; oneDNN multiplies")
    return False


def multiplies_by_tiles() -> bool:
    """Return whether oneDNN multiplies bfloat16 in the place of the kernels, as it does by the tiles of AMX."""
    return torch.cpu._is_amx_tile_supported() or accelerator_name() == ONEDNN


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, built at the first call (seconds) and kept in the cache folder; None without, and a line says why
    where the environment does not ask for that. Raises ProfileError as :func:`accelerator_name`."""
    try:
        return Kernels(load_exports())
    except TorchAlone:
        return None
    except (OSError, ValueError, AttributeError) as error:
        say_once(f"the engine runs without its own CPU kernels, slower: {error}")
        return None


# Linear layers that the kernels multiply.


def multiplies(linear: nn.Module) -> bool:
    """Return whether :class:`NativeLinear` takes ``linear``: a plain ``nn.Linear`` on the CPU with an even number of
    inputs, of a dtype that the kernels multiply here."""
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu" or kernels() is None:
        return False
    return linear.weight.dtype in kernels().multiplied and linear.in_features % 2 == 0


class NativeLinear(nn.Module):
    """One layer whose outputs are those of ``linears``, one after the other; the originals may be freed.

    Its cost is its bytes: weights lie in the panels of ``products.h``, which both cores read as they come. Measured
    with SmolLM2-135M on 2 cores with AVX-512 BF16: the products of a decode step read 53 GB/s for one row and 40 for
    16, where oneDNN's packed ones read 33 and 24; of 512 rows they take 120 ms where oneDNN's take 114.

    Of a gate and an up projection, ``gated``, it is silu(gate) * up. A token's result does not depend on who shares its
    batch. ``panels`` are the weights, where somebody has packed them: ``linears`` then only say what they are.
    """

    def __init__(self, linears: Sequence[nn.Linear], *, gated: bool = False, panels: np.ndarray | None = None) -> None:
        super().__init__()
        self.parts = [linear.out_features for linear in linears]
        outputs, self.in_features = sum(self.parts), linears[0].in_features
        self.out_features = outputs // 2 if gated else outputs
        biases, dtype = [linear.bias for linear in linears], linears[0].weight.dtype
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases]).to(dtype)
        fresh = panels is None
        if fresh:
            step = kernels().panel // 2 if gated else kernels().panel
            count = -(-self.out_features // step) * kernels().panel
            panels = panel_memory().allocate(count * self.in_features * dtype.itemsize)
        self.panels = torch.from_numpy(panels).view(dtype)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        self.struct = WeightStruct(self.panels.data_ptr(), bias, outputs, self.in_features, gated)
        if fresh:
            weights = [linear.weight.detach() for linear in linears]
            joined = weights[0] if len(weights) == 1 else torch.cat(weights)  # a head is large, and its copy too
            kernels().pack(joined.contiguous(), self.struct)

    def with_adapter(self, halves: Sequence[LoraPair | None]) -> NativeLinear | None:
        """Return a layer over the same weight with LoRA's correction, in fp32 as ``LoraLinear`` has it, of each of its
        linear layers, or None of one. None where the kernels cannot: where the outputs of two of them share half a
        panel."""
        if not any(halves):
            return self
        arrays = [pair and (pair[0].numpy(), pair[1].numpy()) for pair in halves]
        dtype = NAMES[self.panels.dtype]
        adapter = packed_adapter(kernels().exports, dtype, self.struct, self.parts, arrays)
        if adapter is None:
            return None
        twin = copy.copy(self)
        twin.adapter = adapter
        twin.struct = WeightStruct.from_buffer_copy(self.struct)
        twin.struct.adapter = adapter.struct
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> NativeLinear:
        """Return this layer itself: nothing writes to its weight."""
        return self

    def forward(self, states: Tensor) -> Tensor:
        """Multiply states [..., in_features] -> [..., out_features]. Raises ModelError for states that do not fit."""
        return self._product(states, None)

    def plus(self, states: Tensor, other: Tensor) -> Tensor:
        """Return the product with ``other`` [..., out_features] added to it."""
        return self._product(states, other.contiguous())

    def _product(self, states: Tensor, other: Tensor | None) -> Tensor:
        if states.dtype != self.panels.dtype or states.shape[-1] != self.in_features:
            raise ModelError(
                f"states {list(states.shape)} of {states.dtype} do not fit a layer of {self.in_features} inputs in "
                f"{self.panels.dtype}"
            )
        out = states.new_empty(*states.shape[:-1], self.out_features)
        return kernels().product(states.contiguous(), self.struct, other, out)
