"""Hidden states in 8 bits: half the bytes of fp16, a bounded error, and nothing that depends on the neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.petals.int8_transport import BLOCK, pack, packed_bytes, unpack
from firsttoken.study.errors import SwarmError


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    tokens=st.integers(0, 5),
    width=st.integers(1, 200),
    block=st.integers(1, 96),
    power=st.integers(-20, 20),
)
def test_no_value_is_off_by_more_than_half_a_step(seed: int, tokens: int, width: int, block: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, tokens, width, generator=generator) * 2.0**power
    hidden[torch.rand(hidden.shape, generator=generator) < 0.02] *= 1000  # the outliers that large models have
    back = unpack(pack(hidden, block), torch.float32)
    assert back.shape == hidden.shape
    for start in range(0, width, block):
        there, here = hidden[..., start : start + block], back[..., start : start + block]
        bound = there.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)
        assert ((there - here).abs() <= bound).all()


def test_the_bytes_are_half_of_fp16_and_the_scales() -> None:
    hidden = torch.randn(1, 16, 576)
    assert packed_bytes(pack(hidden)) == 16 * 576 + 16 * 576 // BLOCK * 4 + 4
    assert packed_bytes(pack(hidden, 576)) / (16 * 576 * 2) < 0.504


def test_a_token_becomes_the_same_alone_and_in_company() -> None:
    hidden = torch.randn(1, 7, 100) * torch.logspace(-3, 3, 7)[None, :, None]
    whole = unpack(pack(hidden, 48), torch.float32)
    alone = [unpack(pack(hidden[:, at : at + 1], 48), torch.float32) for at in range(7)]
    assert torch.equal(whole, torch.cat(alone, 1))


def test_what_has_been_packed_once_packs_to_itself() -> None:
    """Its largest value is a step times 127 again: passing a state on through several servers loses nothing more."""
    once = unpack(pack(torch.randn(1, 5, 128)), torch.float32)
    assert torch.allclose(unpack(pack(once), torch.float32), once, rtol=1e-6, atol=0)


def test_half_precision_comes_back_in_its_own_type() -> None:
    hidden = torch.randn(1, 3, 64, dtype=torch.bfloat16)
    assert unpack(pack(hidden), torch.bfloat16).dtype is torch.bfloat16
    assert torch.equal(unpack(pack(torch.zeros(1, 3, 64)), torch.float16), torch.zeros(1, 3, 64, dtype=torch.float16))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    hidden = torch.zeros(1, 2, 64)
    hidden[0, 1, 3] = value
    with pytest.raises(SwarmError, match="hold NaN or infinity"):
        pack(hidden)


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(SwarmError, match="at least 1 value, not 0"):
        pack(torch.zeros(1, 1, 4), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "are codes, scales, block, not block, codes"),
        ({"more": torch.zeros(1)}, "are codes, scales, block, not block, codes, more, scales"),
        ({"codes": torch.zeros(1, 2, 64)}, "codes must be torch.int8, not torch.float32"),
        ({"scales": torch.zeros(1, 2, 2)}, r"scales \[1, 2, 2\] do not fit codes \[1, 2, 64\] in blocks of 64"),
        (
            {"scales": torch.full((1, 2, 1), float("nan"))},
            "a scale is negative, NaN, or beyond what torch.float32 holds",
        ),
        ({"scales": torch.full((1, 2, 1), -1.0)}, "a scale is negative, NaN, or beyond what torch.float32 holds"),
        ({"scales": torch.full((1, 2, 1), 3e38)}, "a scale is negative, NaN, or beyond what torch.float32 holds"),
        ({"scales": torch.full((1, 2, 1), 3e38), "block": torch.tensor([2**31 - 1], dtype=torch.int32)}, "beyond what"),
        ({"block": torch.tensor([0], dtype=torch.int32)}, "in blocks of 0"),
        ({"block": torch.tensor([-64], dtype=torch.int32)}, "in blocks of -64"),
        ({"block": torch.tensor([], dtype=torch.int32)}, "in blocks of 0"),
        ({"block": torch.tensor([2**31 - 1, 1], dtype=torch.int32)}, "in blocks of 0"),
        ({"codes": torch.tensor(3, dtype=torch.int8)}, r"do not fit codes \[\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    tensors = pack(torch.randn(1, 2, 64)) | change
    with pytest.raises(SwarmError, match=message):
        unpack({name: tensor for name, tensor in tensors.items() if tensor is not None}, torch.float32)


def test_what_half_precision_cannot_hold_is_refused() -> None:
    with pytest.raises(SwarmError, match=r"beyond what torch\.float16 holds"):
        unpack(pack(torch.full((1, 1, 64), 1e6)), torch.float16)
