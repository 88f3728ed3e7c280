"""Linear layers whose weights rest in 8 bits: inputs as they are, or the mixed product of LLM.int8 (Dettmers et al.,
2022; PETALS, section 3.1).

Each output row of a weight has one scale. In the mixed product so has each token of the input, and input values of a
large magnitude stay out of the integers and are multiplied in 32 bits with their columns of the weight. What is an
outlier is decided by value: a token's result does not depend on who shares its batch. Of the perplexity that the mixed
product loses (SmolLM2-135M, notebook 51) most is lost by the inputs' rounding, not by the weights'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firsttoken.study.errors import ModelError

THRESHOLD = 6.0  # LLM.int8's
UNROUNDED = 0.0  # every input value is an outlier: nothing of the input is rounded
_LARGEST = 127
_AT_ONCE = 2**22  # values put into codes: a matrix of BLOOM would be 3.3 GB in float32
# A product of few bf16 rows reads codes in half the time of bf16 weights, one of more is slower than to write the codes
# as bf16 first (both cross near 12 rows, 576 to 4,096 wide, with AVX-512 BF16). torch 2.13 ends the process where a row
# of codes is no multiple of 16.
_FEW, _WHOLE = 12, 32
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


@lru_cache(maxsize=1)
def _sums_are_exact() -> bool:
    """Return whether torch adds up the products of the largest codes: held to AVX2 on a processor with VNNI
    (``ONEDNN_MAX_CPU_ISA``) it does not, and says nothing."""
    most = torch.full((1, 2), _LARGEST, dtype=torch.int8)
    return int(torch._int_mm(most, most.t())) == 2 * _LARGEST**2


def _integer_product(x: Tensor, codes: Tensor) -> Tensor:
    """int8 [rows, in] times the transpose of int8 [out, in]: the exact sums in int32, on every device."""
    # of one column torch 2.13 reads the next ones as well; of 512 rows it takes 25 times float32's time without VNNI
    if x.device.type == "cpu" and codes.shape[1] > 1 and torch.cpu._is_vnni_supported() and _sums_are_exact():
        return torch._int_mm(x, codes.t())
    pieces = zip(x.split(_EXACT, 1), codes.split(_EXACT, 1), strict=True)
    return torch.stack([(row_piece.float() @ right.float().t()).int() for row_piece, right in pieces]).sum(
        0, dtype=torch.int32
    )


def _quantize_rows(codes: Tensor, weight: Tensor) -> Tensor:
    """Write ``codes`` int8 [rows, in] of ``weight``; a float32 scale a row. ModelError where it is not finite."""
    if not torch.isfinite(weight).all():
        raise ModelError("a weight is NaN or infinite and has no 8-bit form; copy the checkpoint again")
    scales = (weight.abs().amax(1) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes.copy_((weight / scales[:, None]).round_())
    return scales


def _unrounded_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x [rows, in] times the transpose of codes [out, in] with scales [out], in the dtype of x."""
    fits = x.dtype == torch.bfloat16 and not x.requires_grad and x.device.type == "cpu" and not codes.shape[1] % _WHOLE
    if fits and len(x) <= _FEW:
        sums = torch._weight_int8pack_mm(x.contiguous(), codes, torch.ones_like(scales, dtype=x.dtype))
        return (sums.float() * scales).to(x.dtype)
    wide = x.float() if x.dtype == torch.float16 else x  # sums of products with codes are no numbers of float16
    pieces = codes.split(max(1, _AT_ONCE // codes.shape[1]))
    sums = torch.cat([F.linear(wide, piece.to(wide.dtype)) for piece in pieces], 1)
    return (sums.float() * scales).to(x.dtype)


class Linear8(nn.Module):
    """A frozen linear layer of int8 ``codes`` [out, in], float32 ``scales`` [out], and a ``bias`` as it was.

    Input values from ``threshold`` on stay out of the integers: all of them if it is ``UNROUNDED``."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, threshold: float = THRESHOLD) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.threshold = threshold
        self.register_buffer("scales", scales)
        self.register_buffer("codes", codes)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def of(cls, linear: nn.Linear, threshold: float = THRESHOLD) -> Self:
        """Return ``linear`` in 8 bits. Raises ModelError for weights that are not finite."""
        codes, scales = quantize(linear.weight.detach())
        return cls(codes, scales, None if linear.bias is None else linear.bias.clone(), threshold)

    @classmethod
    def joined(cls, layers: Sequence[Linear8]) -> Self:
        """One layer whose outputs are those of ``layers``, one after the other."""
        biases = [layer.bias for layer in layers]
        bias = None if biases[0] is None else torch.cat(biases)
        codes, scales = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("codes", "scales"))
        return cls(codes, scales, bias, layers[0].threshold)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` [..., in] -> [..., out] in its dtype."""
        rows = x.reshape(-1, self.in_features)
        if self.threshold == UNROUNDED:
            result = _unrounded_product(rows, self.codes, self.scales)
        else:
            result = _MixedProduct.apply(rows, self.codes, self.scales, self.threshold)
        result = result.unflatten(0, x.shape[:-1])
        return result if self.bias is None else result + self.bias

    def plus(self, states: Tensor, other: Tensor) -> Tensor:
        """Return the product with ``other`` [..., out_features] added to it."""
        return self(states) + other

    def dequantized(self) -> Tensor:
        """The weight [out, in] in float32 that the codes stand for."""
        return self.codes.float() * self.scales[:, None]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and float32 scales [out] of ``weight`` [out, in]. Raises ModelError if not finite."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    rows = max(1, _AT_ONCE // weight.shape[1])
    pieces = zip(weight.split(rows), codes.split(rows), strict=True)
    return codes, torch.cat([_quantize_rows(target, piece.float()) for piece, target in pieces])


def to_8_bits(modules: Iterable[nn.Module], threshold: float = THRESHOLD) -> int:
    """Put a :class:`Linear8` in the place of every linear layer within ``modules``; return how many there were.

    Raises ModelError where there are none, as in fused layers.
    """
    linears = [
        (parent, name, child)
        for module in modules
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, linear in linears:
        setattr(parent, name, Linear8.of(linear, threshold))
    if not linears:
        raise ModelError("these layers hold no nn.Linear to put into 8 bits; take them before they are fused")
    return len(linears)


def resting_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and buffers of ``modules``."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
