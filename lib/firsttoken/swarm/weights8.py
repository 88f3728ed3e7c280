"""Weights that rest in 8 bits: the mixed product of LLM.int8 (Dettmers et al., 2022; PETALS, section 3.1).

Each output row of a weight has one scale, and so has each token of the input. Input values of a large magnitude stay
out of the integers and are multiplied in 32 bits with their columns of the weight. What is an outlier is decided by
value: a token's result does not depend on who shares its batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from firsttoken.study.errors import ModelError

THRESHOLD = 6.0  # LLM.int8's
_LARGEST = 127
_AT_ONCE = 2**22  # values put into codes: a matrix of BLOOM would be 3.3 GB in float32
_EXACT = 2**24 // _LARGEST**2  # so many products of two codes add up exactly in float32


class _MixedProduct(torch.autograd.Function):
    """x [rows, in] times the transpose of codes [out, in] with scales [out]; its gradient is that of the weight as it
    is stored, as if x had not been rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(codes, scales)
        rows = x.float()
        outliers = rows.abs() >= threshold
        columns = outliers.any(0).nonzero().flatten()
        if len(columns):
            regular = rows.masked_fill(outliers, 0.0)
            stored = codes[:, columns].float() * scales[:, None]
            mixed = (rows - regular)[:, columns] @ stored.t()
        else:
            regular, mixed = rows, None
        steps = (regular.abs().amax(1, keepdim=True) / _LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
        sums = _integer_product((regular / steps).round_().to(torch.int8), codes)
        result = sums.float().mul_(steps).mul_(scales)
        return (result if mixed is None else result.add_(mixed)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        (gradient,) = gradients
        return ((gradient.float() * scales) @ codes.float()).to(gradient.dtype), None, None, None


def _integer_product(x: Tensor, codes: Tensor) -> Tensor:
    """int8 [rows, in] times the transpose of int8 [out, in]: the exact sums in int32, on every device."""
    # of one column torch 2.13 reads the next ones as well; of 512 rows it takes 25 times float32's time without VNNI
    if x.device.type == "cpu" and codes.shape[1] > 1 and torch.cpu._is_vnni_supported():
        return torch._int_mm(x, codes.t())
    pieces = zip(x.split(_EXACT, 1), codes.split(_EXACT, 1), strict=True)
    return torch.stack([(left.float() @ right.float().t()).int() for left, right in pieces]).sum(0, dtype=torch.int32)


def _put_into(codes: Tensor, weight: Tensor) -> Tensor:
    """Write ``codes`` int8 [rows, in] of ``weight``; a float32 scale a row. ModelError where it is not finite."""
    if not torch.isfinite(weight).all():
        raise ModelError("a weight is NaN or infinite and has no 8-bit form; copy the checkpoint again")
    scales = (weight.abs().amax(1) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes.copy_((weight / scales[:, None]).round_())
    return scales


class Linear8(nn.Module):
    """A frozen linear layer of int8 weights [out, in], a float32 scale a row, and a bias as it was.

    Raises ModelError for weights that are not finite.
    """

    def __init__(self, linear: nn.Linear, threshold: float = THRESHOLD) -> None:
        super().__init__()
        self.in_features, self.out_features, self.threshold = linear.in_features, linear.out_features, threshold
        weight, rows = linear.weight.detach(), max(1, _AT_ONCE // linear.in_features)
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        pieces = zip(weight.split(rows), codes.split(rows), strict=True)
        self.register_buffer("scales", torch.cat([_put_into(target, piece.float()) for piece, target in pieces]))
        self.register_buffer("codes", codes)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in] -> [..., out] in its dtype."""
        rows = x.reshape(-1, self.in_features)
        result = _MixedProduct.apply(rows, self.codes, self.scales, self.threshold).unflatten(0, x.shape[:-1])
        return result if self.bias is None else result + self.bias

    def stored(self) -> Tensor:
        """The weight [out, in] in float32 that the codes stand for."""
        return self.codes.float() * self.scales[:, None]


def to_8_bits(modules: Iterable[nn.Module], threshold: float = THRESHOLD) -> int:
    """Put a :class:`Linear8` in the place of every linear layer within ``modules``; how many there were.

    Raises ModelError where there are none, as in fused layers.
    """
    found = [
        (parent, name, child)
        for module in modules
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, linear in found:
        setattr(parent, name, Linear8(linear, threshold))
    if not found:
        raise ModelError("these layers hold no nn.Linear to put into 8 bits; take them before they are fused")
    return len(found)


def resting_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and buffers of ``modules``."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
