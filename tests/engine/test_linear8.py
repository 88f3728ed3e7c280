"""8-bit weights: the product of the stored weight within the rounding of the input, gradients exact, half the bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import load_model
from firsttoken.engine import linear8
from firsttoken.engine.linear8 import THRESHOLD, UNROUNDED, Linear8, _integer_product, resting_bytes, to_8_bits
from firsttoken.study.errors import ModelError
from firsttoken_cpu.fused import FusedLayer, fuse
from firsttoken_cpu.native.library import kernels


def linear(inner: int, outer: int, seed: int = 0, bias: bool = False) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inner, outer, bias=bias).requires_grad_(False)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 9),
    inner=st.integers(1, 70),
    outer=st.integers(1, 40),
    outliers=st.booleans(),
)
def test_the_product_is_the_stored_weights_within_half_a_step(
    seed: int, rows: int, inner: int, outer: int, outliers: bool
) -> None:
    layer = Linear8.of(linear(inner, outer, seed, bias=True))
    x = torch.randn(rows, inner) * 2
    if outliers:
        x[:, 0] = 300.0  # without the split it would be the scale of its token, and drown the others
    exact = x @ layer.dequantized().t() + layer.bias
    step = x.masked_fill(x.abs() >= THRESHOLD, 0).abs().amax(1, keepdim=True) / 127
    bound = 0.5 * step * layer.dequantized().abs().sum(1) * (1 + 1e-4) + 1e-4 * exact.abs() + 1e-5
    assert ((layer(x) - exact).abs() <= bound).all()


@pytest.mark.parametrize("vnni", [False, True])
@pytest.mark.parametrize("inner", [1, 1040, 3000])
def test_the_integers_are_multiplied_exactly(monkeypatch, inner: int, vnni: bool) -> None:
    """With the largest codes: 3,000 products of them are no number of float32's."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    x, codes = (torch.full((rows, inner), 127, dtype=torch.int8) for rows in (2, 3))
    x[0], codes[0, ::3] = -127, 126
    assert torch.equal(_integer_product(x, codes).long(), x.long() @ codes.long().t())


def test_torch_is_asked_whether_it_adds_up(monkeypatch) -> None:
    """On a processor that is held below its vectors it may say 255 for 2 x 127 x 127."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr(linear8, "_sums_are_exact", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", lambda x, codes: torch.full((len(x), codes.shape[1]), 255))
    x, codes = (torch.full((rows, 2), 127, dtype=torch.int8) for rows in (1, 3))
    assert _integer_product(x, codes).tolist() == [[2 * 127**2] * 3]
    monkeypatch.undo()
    linear8._sums_are_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", lambda x, codes: torch.full((1, 1), 255))
    try:
        assert linear8._sums_are_exact() is False
    finally:
        linear8._sums_are_exact.cache_clear()


def test_the_stored_weight_is_off_by_half_a_step_at_most() -> None:
    before = linear(64, 48)
    stored = Linear8.of(before).dequantized()
    assert ((stored - before.weight).abs() <= before.weight.abs().amax(1, keepdim=True) / 254 * (1 + 1e-5)).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(0, 30),
    inner=st.sampled_from([1, 16, 31, 32, 64, 96]),
    outer=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_inputs_that_are_kept_cost_no_more_than_their_dtype(
    seed: int, rows: int, inner: int, outer: int, dtype: torch.dtype
) -> None:
    """Within four roundings of the dtype, of the sum of all magnitudes: few rows and many, odd widths and not."""
    layer = Linear8.of(linear(inner, outer, seed, bias=True), UNROUNDED)
    x = (torch.randn(rows, inner) * 100).to(dtype)
    exact = x.float() @ layer.dequantized().t() + layer.bias
    bound = 4 * torch.finfo(dtype).eps * (x.float().abs() @ layer.dequantized().abs().t() + layer.bias.abs())
    result = layer(x)
    assert result.shape == (rows, outer)
    assert ((result.float() - exact).abs() <= bound + 1e-6).all()


def test_what_is_joined_is_all_of_them_one_after_the_other() -> None:
    parts = [Linear8.of(linear(32, outer, outer, bias=True), UNROUNDED) for outer in (8, 24)]
    x, other = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    expected = torch.cat([part(x) for part in parts], -1)
    assert torch.allclose(Linear8.joined(parts)(x), expected, atol=1e-5)
    assert torch.allclose(Linear8.joined(parts).plus(x, other), expected + other, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_of_8_bits_give_what_the_stock_ones_give(dtype: torch.dtype) -> None:
    model = load_model("random:tiny", dtype=dtype).model
    to_8_bits(layers_of(model), UNROUNDED)
    ids = torch.arange(24)[None]
    before = model(ids, use_cache=False).logits
    after = fuse(model)(ids, use_cache=False).logits
    assert (after - before).abs().max() <= (1e-4 if dtype == torch.float32 else 0.03) * before.abs().max()
    assert all(isinstance(layer, FusedLayer) == (kernels() is not None) for layer in layers_of(model))


def test_a_token_becomes_the_same_alone_and_beside_outliers() -> None:
    layer, x = Linear8.of(linear(64, 48)), torch.randn(6, 64)
    x[3] *= 50
    assert torch.allclose(torch.cat([layer(row[None]) for row in x]), layer(x), atol=1e-5)


def test_gradients_are_those_of_the_stored_weight() -> None:
    layer, x = Linear8.of(linear(32, 16, bias=True)), torch.randn(2, 3, 32, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ layer.dequantized().t()).square().sum(), x)
    output = layer(x)
    (given_back,) = torch.autograd.grad(output, x, 2 * (x @ layer.dequantized().t()).detach())
    assert torch.allclose(given_back, expected, atol=1e-4)
    assert not list(layer.parameters()), "servers train nothing"


def test_half_precision_stays_in_its_type() -> None:
    layer = Linear8.of(linear(32, 16).bfloat16())
    assert layer(torch.randn(1, 2, 32).bfloat16()).dtype is torch.bfloat16


def test_a_model_in_8_bits_says_nearly_the_same_in_half_the_bytes() -> None:
    model, ids = load_model("random:tiny").model, torch.arange(24)[None]
    layers = layers_of(model)
    before, bytes16 = model(ids).logits, resting_bytes(layers) / 2
    count = to_8_bits(layers)
    assert count == 7 * len(layers)
    assert (model(ids).logits - before).abs().max() < 0.05 * before.abs().max()
    assert 0.5 <= resting_bytes(layers) / bytes16 < 0.6


def test_what_cannot_rest_in_8_bits_is_refused() -> None:
    broken = linear(8, 8)
    broken.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="NaN or infinite and has no 8-bit form"):
        Linear8.of(broken)
    with pytest.raises(ModelError, match=r"hold no nn\.Linear"):
        to_8_bits([nn.LayerNorm(8)])
