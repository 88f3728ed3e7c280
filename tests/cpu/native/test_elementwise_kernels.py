"""The kernels for norm, gate and rotation: what transformers computes, up to one rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from firsttoken_cpu.native.exports import WIDTHS
from firsttoken_cpu.native.library import Kernels

DTYPES = (torch.float32, torch.bfloat16)
HALF_ULP = 2**-8  # the most that rounding to bf16 changes a number, as a share of it
FEW = settings(max_examples=50, deadline=None)


def assert_near(got: Tensor, wanted: Tensor, atol: float = 1e-6) -> None:
    """fp32: within 1e-6; bf16: one rounding in between and one in the end."""
    rtol = 4 * HALF_ULP if wanted.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


@FEW
@given(
    tokens=st.one_of(st.integers(0, 5), st.integers(31, 70)),
    width=st.one_of(st.integers(1, 70), st.just(576)),
    epsilon=st.sampled_from((1e-6, 1e-5)),
    size=st.sampled_from((1e-3, 1.0, 1e3)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_norm_is_that_of_transformers(
    native: Kernels, tokens: int, width: int, epsilon: float, size: float, dtype: torch.dtype, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    norm = LlamaRMSNorm(width, epsilon).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(width, generator=draw))
    states = (torch.randn(1, tokens, width, generator=draw) * size).to(dtype)
    kept = states.clone()
    got = native.rms_norm(states, norm.weight, epsilon)
    assert torch.equal(states, kept)
    assert_near(got, norm(states))


@FEW
@given(
    tokens=st.one_of(st.integers(0, 5), st.integers(31, 70)),
    width=st.integers(1, 70),
    size=st.sampled_from((1e-3, 1.0, 100.0)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_gate_is_silu_times_the_other_half(
    native: Kernels, tokens: int, width: int, size: float, dtype: torch.dtype, seed: int
) -> None:
    states = (torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
    gate, up = states.chunk(2, -1)
    assert_near(native.gated(states), F.silu(gate) * up, atol=1e-5)
    assert_near(native.gated(states[None]), (F.silu(gate) * up)[None], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_at_the_ends_of_the_numbers(native: Kernels, dtype: torch.dtype) -> None:
    """Neither overflows where e to the power of the gate would, nor loses a NaN."""
    gate = torch.tensor([-3e38, -200, -90, -87, -1e-30, -0.0, 0, 1e-30, 87, 90, 200, 3e38, torch.inf], dtype=dtype)
    got = native.gated(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    torch.testing.assert_close(got, F.silu(gate), rtol=1e-6, atol=6)  # -3e38 times the least of numbers is -5, not 0
    torch.testing.assert_close(got[1:], F.silu(gate)[1:], rtol=1e-6, atol=1e-35)
    nan = torch.tensor([[torch.nan, 1, 1, torch.nan]], dtype=dtype)
    assert native.gated(nan).isnan().all()


@FEW
@given(
    tokens=st.one_of(st.integers(0, 5), st.integers(31, 70)),
    heads=st.integers(1, 12),
    values=st.integers(0, 3),
    head_dim=st.one_of(st.sampled_from(WIDTHS), st.integers(1, 30).map(lambda half: 2 * half)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_rotation_is_that_of_transformers(
    native: Kernels, tokens: int, heads: int, values: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    """In place, where queries and keys lie before the values, which stay as they are."""
    draw = torch.Generator().manual_seed(seed)
    joint = torch.randn(tokens, heads + values, head_dim, generator=draw).to(dtype)
    angles = torch.randn(tokens, head_dim, generator=draw) * 100
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted = apply_rotary_pos_emb(joint[:, :heads], joint[:, :heads], cos, sin)[0]
    before = joint.clone()
    native.rotate(joint[:, :heads], cos, sin)
    assert torch.equal(joint[:, heads:], before[:, heads:])
    if dtype == torch.bfloat16:  # rounded after every operation: nothing is left to differ
        assert torch.equal(joint[:, :heads], wanted)
    else:
        assert_near(joint[:, :heads], wanted)


def test_bf16_differs_from_transformers_almost_nowhere(native: Kernels) -> None:
    """In a million elements: sums are added up in another order, and e to the power of is another polynomial."""
    draw = torch.Generator().manual_seed(0)
    norm = LlamaRMSNorm(576, 1e-5).to(torch.bfloat16).requires_grad_(False)
    norm.weight.copy_(torch.randn(576, generator=draw))
    states = torch.randn(2000, 576, generator=draw).to(torch.bfloat16)
    gate, up = states.chunk(2, -1)
    for got, wanted in (
        (native.rms_norm(states, norm.weight, 1e-5), norm(states)),
        (native.gated(states), F.silu(gate) * up),
    ):
        assert int((got != wanted).sum()) <= 1e-4 * got.numel()
        assert_near(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_threads_compute_what_one_does(native: Kernels, set_threads, dtype: torch.dtype) -> None:
    states, weight = torch.randn(80, 9, 64).to(dtype), torch.linspace(-1, 1, 64).to(dtype)
    cos, sin = (states[:, at].contiguous() for at in (0, 1))
    said = []
    for threads in (1, 2):
        set_threads(threads)
        turned = states.clone()
        native.rotate(turned, cos, sin)
        said.append((native.rms_norm(states, weight, 1e-5), native.gated(states), turned))
    assert all(torch.equal(one, two) for one, two in zip(*said, strict=True))


@FEW
@given(
    rows=st.sampled_from((1, 3, 5, 70)),
    width=st.one_of(st.integers(1, 70), st.sampled_from((255, 256, 257, 1000))),
    levels=st.sampled_from((1, 3, 10_000)),
    odd=st.sampled_from((None, float("nan"), float("inf"), -float("inf"))),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_the_largest_is_the_first_of_equals(
    native: Kernels, rows: int, width: int, levels: int, odd: float | None, dtype: torch.dtype, seed: int
) -> None:
    """As torch's ``max`` says it, whatever ``odd`` number is among them; of few ``levels`` many are equal."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (rows, width), generator=draw).to(dtype) / 8
    if odd is not None:
        logits[rows // 2, int(torch.randint(width, (1,), generator=draw))] = odd
        logits[-1] = odd
    places, values = native.largest(logits)
    wanted = logits.max(-1)
    torch.testing.assert_close(values, wanted.values.float(), rtol=0, atol=0, equal_nan=True)
    finite = ~wanted.values.isnan()
    assert torch.equal(places[finite], wanted.indices[finite])
