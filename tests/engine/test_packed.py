"""Packed weights: the same products in another layout, up to the rounding of the dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from firsttoken.engine.packed import PackedLinear, pack_linears
from firsttoken.engine.request import Sampling

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")

IDS = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))


def supported(dtype: torch.dtype) -> bool:
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@torch.inference_mode()
def test_one_product(dtype: torch.dtype, rtol: float, bias: bool) -> None:
    if not supported(dtype):
        pytest.skip("this CPU does not multiply bf16")
    linear = nn.Linear(48, 80, bias=bias, dtype=dtype)
    packed = PackedLinear(linear)
    assert (packed.in_features, packed.out_features) == (48, 80)
    for shape in ((48,), (1, 48), (0, 48), (2, 3, 48), (1, 300, 48)):
        states = torch.randn(shape).to(dtype)
        torch.testing.assert_close(packed(states), linear(states), rtol=rtol, atol=rtol)
    every_other = torch.randn(5, 96).to(dtype)[:, ::2]
    torch.testing.assert_close(packed(every_other), linear(every_other), rtol=rtol, atol=rtol)


def test_packing_is_a_copy() -> None:
    linear = nn.Linear(8, 8)
    packed, states = PackedLinear(linear), torch.randn(2, 8)
    before = linear(states)
    nn.init.zeros_(linear.weight)
    torch.testing.assert_close(packed(states), before)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "lora"])
@torch.inference_mode()
def test_logits_stay(kind: str, request: pytest.FixtureRequest) -> None:
    """Measured: equal to the bit in fp32 and bf16 here; another CPU may add up in another order."""
    model = request.getfixturevalue(kind).model
    packed = pack_linears(copy.deepcopy(model))
    assert isinstance(packed.get_output_embeddings(), PackedLinear)
    left = [name for name, module in packed.named_modules() if type(module) is nn.Linear]
    assert all(".lora_" in name for name in left) and bool(left) == (kind == "lora")
    torch.testing.assert_close(packed(IDS).logits, model(IDS).logits, rtol=0, atol=1e-4)
    if kind != "lora" and supported(torch.bfloat16):
        exact = model(IDS).logits
        half = copy.deepcopy(model).to(torch.bfloat16)
        far = (half(IDS).logits - exact).norm()
        assert (pack_linears(half)(IDS).logits - exact).norm() < 1.2 * far


def test_what_the_cpu_does_not_multiply_stays_as_it_is(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    half = copy.deepcopy(llama.model).to(torch.float64)
    before = half(IDS).logits
    assert torch.equal(pack_linears(half)(IDS).logits, before)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = pack_linears(copy.deepcopy(llama.model))
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_tied_weights_are_packed_for_the_head_and_kept_for_the_embedding(llama) -> None:
    model = copy.deepcopy(llama.model)
    model.lm_head.weight = model.model.embed_tokens.weight
    before = model(IDS).logits
    torch.testing.assert_close(pack_linears(model)(IDS).logits, before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "lora"])
def test_the_engine_says_the_same_with_them(lab, kind: str, request: pytest.FixtureRequest) -> None:
    subject = request.getfixturevalue(kind)
    run = lab.live(pack_linears(copy.deepcopy(subject.model)), 20, host_blocks=100, preemption="swap")
    for one in subject.known[-4:]:
        run.submit(one.prompt, Sampling(24))
    assert run.finish() == [list(one.answer) for one in subject.known[-4:]]
    assert run.trace.recoveries
