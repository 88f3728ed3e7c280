"""Linear layers whose cost is their bytes: weights in the panels of ``products.h``, which both cores read as they come.

Measured with SmolLM2-135M on 2 cores with AVX-512 BF16: the products of a decode step read 53 GB/s for one row and 40
for 16, where oneDNN's packed ones read 33 and 24; of 512 rows they take 120 ms where oneDNN's take 114.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from firsttoken.engine.native.exports import PANELS
from firsttoken.engine.native.library import kernels
from firsttoken.study.errors import ModelError


def multiplies(linear: nn.Module) -> bool:
    """Whether :class:`NativeLinear` takes it: a plain ``nn.Linear`` on the CPU with an even number of inputs, of a
    dtype that the kernels multiply here."""
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu" or kernels() is None:
        return False
    return linear.weight.dtype in kernels().multiplied and linear.in_features % 2 == 0


Halves = tuple[Tensor, Tensor]
"""What LoRA adds to one linear layer: A [rank, in] and B [out, rank] in fp32, B already scaled."""


class NativeLinear(nn.Module):
    """One layer whose outputs are those of ``linears``, one after the other; the originals may be freed.

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
            panels = PANELS.take(count * self.in_features * dtype.itemsize)
        self.panels = torch.from_numpy(panels).view(dtype)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        self.fields = np.array(
            [self.panels.data_ptr(), bias, outputs, self.in_features, gated, *[0] * 5], dtype=np.int64
        )
        if fresh:
            kernels().pack(torch.cat([linear.weight.detach() for linear in linears]).contiguous(), self.fields)

    def with_adapter(self, halves: Sequence[Halves | None]) -> NativeLinear | None:
        """The same over the same weight with LoRA's correction, in fp32 as ``LoraLinear`` has it, of each of its linear
        layers, or None of one. None where the kernels cannot: where the outputs of two of them share half a panel."""
        there = [pair for pair in halves if pair is not None]
        if not there:
            return self
        rank = max(len(a) for a, _ in there)
        b = torch.zeros(sum(self.parts), rank)
        offsets = torch.empty(len(b), dtype=torch.int64)
        output = offset = 0
        for outputs, pair in zip(self.parts, halves, strict=True):
            offsets[output : output + outputs] = offset
            if pair is not None:
                b[output : output + outputs, : len(pair[0])] = pair[1]
                offset += len(pair[0])
            output += outputs
        packed, places = kernels().pack_adapter(b, offsets, self.fields, self.panels.dtype)
        if not len(places):
            return None
        # every output reads rank numbers from its offset on, one whose adapter is smaller and one that has none, too
        a = torch.zeros(int(offsets.max()) + rank, self.in_features)
        a[: sum(len(pair[0]) for pair in there)] = torch.cat([pair[0] for pair in there])
        twin = copy.copy(self)
        twin.adapter = a, packed, places  # what the fields point at
        twin.fields = self.fields.copy()
        twin.fields[5:] = a.data_ptr(), packed.data_ptr(), places.data_ptr(), len(a), rank
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> NativeLinear:
        """Itself: nothing writes to its weight."""
        return self

    def forward(self, states: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]. Raises ModelError for states that do not fit."""
        return self._product(states, None)

    def plus(self, states: Tensor, other: Tensor) -> Tensor:
        """The product, and ``other`` [..., out_features] added to it."""
        return self._product(states, other.contiguous())

    def _product(self, states: Tensor, other: Tensor | None) -> Tensor:
        if states.dtype != self.panels.dtype or states.shape[-1] != self.in_features:
            raise ModelError(
                f"states {list(states.shape)} of {states.dtype} do not fit a layer of {self.in_features} inputs in "
                f"{self.panels.dtype}"
            )
        out = states.new_empty(*states.shape[:-1], self.out_features)
        return kernels().product(states.contiguous(), self.fields, other, out)
