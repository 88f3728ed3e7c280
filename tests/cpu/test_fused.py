"""Packed weights and fused layers: the same results in other operations, up to the rounding of the dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LNTuningConfig, get_peft_model
from small_models import small_model
from torch import nn
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from firsttoken.engine import live_executor
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.lora import with_adapter
from firsttoken.engine.request import Sampling, ScheduledChunk
from firsttoken.study.errors import ModelError
from firsttoken.study.system.compiled import say_once
from firsttoken_cpu import fused
from firsttoken_cpu.fused import FusedLayer, PackedLinear, fuse, fuse_layer, packs
from firsttoken_cpu.native import exports, library
from firsttoken_cpu.native.library import Kernels, NativeLinear, kernels, multiplies

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")

IDS = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
PACKED = (PackedLinear, NativeLinear)
SHAPES = ((48,), (1, 48), (0, 48), (2, 3, 48), (1, 300, 48))
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 0.02)]


def skip_unless_multiplied(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU does not multiply bf16")


@pytest.fixture
def compiled() -> None:
    if kernels() is None:
        pytest.skip("no C++ compiler builds the kernels here")


def count(model: nn.Module, *kinds: type[nn.Module]) -> int:
    return sum(type(module) in kinds for module in model.modules())


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def pack(kind: str, linear: nn.Linear) -> PackedLinear | NativeLinear:
    """``linear`` as oneDNN multiplies it, or as the kernels do."""
    skip_unless_multiplied(linear.weight.dtype)
    if kind == "onednn":
        return PackedLinear(linear)
    if not multiplies(linear):
        pytest.skip("the kernels do not multiply this dtype here")
    return NativeLinear([linear])


@pytest.mark.parametrize("kind", ["onednn", "native"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@torch.inference_mode()
def test_one_product_and_a_sum(dtype: torch.dtype, rtol: float, bias: bool, kind: str) -> None:
    """What is added stays what it was: it is the residual stream."""
    linear = nn.Linear(48, 80, bias=bias, dtype=dtype)
    packed = pack(kind, linear)
    assert (packed.in_features, packed.out_features) == (48, 80)
    given = [(torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 80).to(dtype)) for shape in SHAPES]
    given.append((torch.randn(5, 96).to(dtype)[:, ::2], torch.randn(5, 160).to(dtype)[:, ::2]))  # not contiguous
    for states, other in given:
        before = other.clone()
        torch.testing.assert_close(packed(states), linear(states), rtol=rtol, atol=rtol)
        torch.testing.assert_close(packed.plus(states, other), linear(states) + other, rtol=rtol, atol=rtol)
        assert torch.equal(other, before)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@torch.inference_mode()
def test_native_products_of_odd_shapes(compiled, dtype: torch.dtype, rtol: float, gated: bool) -> None:
    """Every number of outputs around a panel's, and of rows around those that go through it together."""
    generator = torch.Generator().manual_seed(0)
    for outputs in (1, 2, 15, 16, 17, 31, 32, 33, 67):
        pair = [nn.Linear(10, outputs, dtype=dtype) for _ in range(1 + gated)]
        if not all(map(multiplies, pair)):
            pytest.skip("the kernels do not multiply this dtype here")
        packed = NativeLinear(pair, gated=gated)
        for rows in (0, 1, 2, 5, 6, 7, 13, 14, 15, 28, 29, 43):
            states = torch.randn(rows, 10, generator=generator).to(dtype)
            wanted = pair[0](states)
            if gated:
                wanted = nn.functional.silu(wanted) * pair[1](states)
            torch.testing.assert_close(packed(states), wanted, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_native_product_does_not_depend_on_who_shares_its_batch(compiled, dtype: torch.dtype) -> None:
    """To the bit, whatever the number of rows: the sums are made in one order."""
    packed = pack("native", nn.Linear(576, 67, dtype=dtype))
    states = torch.randn(64, 576).to(dtype)
    together = packed(states)
    for rows in (1, 2, 3, 7, 14, 15, 16, 30, 63):
        assert torch.equal(packed(states[:rows]), together[:rows])


def test_native_products_refuse_states_that_do_not_fit(compiled) -> None:
    packed = pack("native", nn.Linear(8, 4))
    for states in (torch.zeros(2, 6), torch.zeros(2, 8, dtype=torch.bfloat16)):
        with pytest.raises(ModelError, match=r"do not fit a layer of 8 inputs in torch\.float32"):
            packed(states)


def test_weights_of_an_odd_number_of_inputs_are_left_to_onednn(compiled) -> None:
    assert multiplies(nn.Linear(8, 4)) and not multiplies(nn.Linear(7, 4))
    assert not multiplies(nn.Linear(8, 4, dtype=torch.float64)) and not multiplies(nn.Linear(8, 4, device="meta"))
    assert type(fused.packed(nn.Linear(7, 4))) is PackedLinear and type(fused.packed(nn.Linear(8, 4))) is NativeLinear


def test_a_kernel_that_multiplies_wrongly_is_not_used(compiled, llama, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """The products of its first call are held against whole numbers; oneDNN multiplies then, and one line says so."""
    right = exports.widened
    monkeypatch.setattr(exports, "widened", lambda numbers: right(numbers) + 1)
    say_once.cache_clear()
    tried = Kernels(exports.load_exports())
    line = "firsttoken: the engine's own float32 products are wrong on this processor; oneDNN multiplies"
    assert not tried.multiplied and capfd.readouterr().err.splitlines().count(line) == 1
    monkeypatch.undo()
    monkeypatch.setattr(library, "kernels", lambda: tried)
    other = fuse(copy.deepcopy(llama.model))
    assert count(other, NativeLinear) == 0 and count(other, FusedLayer) == 2
    assert_same(other(IDS).logits, llama.model(IDS).logits)


def adapter_of(layer: nn.Module, ranks: dict[str, int], generator: torch.Generator) -> dict[str, tuple]:
    """LoRA's halves for the modules of a layer that ``ranks`` names."""
    shapes = {path: layer.get_submodule(path).weight.shape for path in ranks}
    return {
        path: tuple(
            scale * torch.randn(size, generator=generator)
            for scale, size in ((1.0, (rank, shapes[path][1])), (0.1, (shapes[path][0], rank)))
        )
        for path, rank in ranks.items()
    }


RANKS = {
    "all alike": dict.fromkeys([path for paths in exports.PRODUCTS.values() for path in paths], 4),
    "some": {"self_attn.q_proj": 3, "self_attn.v_proj": 5, "mlp.up_proj": 2, "mlp.down_proj": 7},
    "one": {"mlp.gate_proj": 1},
    "none": {},
}


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_fused_layer_with_an_adapter(compiled, make_model, dtype: torch.dtype, ranks: dict[str, int]) -> None:
    """Over the same weights as the layer without, what ``LoraLinear`` says; the layer itself stays as it was."""
    skip_unless_multiplied(dtype)
    shape = LlamaConfig(**(SMALL | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}))
    model = make_model(shape).to(dtype)
    layer, generator = model.model.layers[0], torch.Generator().manual_seed(3)
    if not all(map(multiplies, [layer.mlp.up_proj])):
        pytest.skip("the kernels do not multiply this dtype here")
    slices = adapter_of(layer, ranks, generator)
    plain = fuse_layer(layer)
    adapted = plain.with_adapter(slices)
    assert adapted.kind == plain.kind and adapted.joint.panels.data_ptr() == plain.joint.panels.data_ptr()
    states = torch.randn(1, 21, 64, generator=generator).to(dtype)
    turns = model.model.rotary_emb(states, torch.arange(21)[None])
    causal = torch.full((21, 21), float("-inf"), dtype=dtype).triu(1)[None, None]
    before = plain(states, causal, position_embeddings=turns)
    wanted = with_adapter(layer, slices)(states, attention_mask=causal, position_embeddings=turns)
    got = adapted(states, causal, position_embeddings=turns)
    near = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=near)
    assert torch.equal(plain(states, causal, position_embeddings=turns), before)
    assert torch.equal(got, before) == (not ranks)


def test_an_adapter_that_the_kernels_do_not_add_up(compiled, make_model) -> None:
    """Heads of 8 share half a panel; a module that is in no product; layers that oneDNN multiplies."""
    narrow = fuse_layer(make_model(LlamaConfig(**SMALL)).model.layers[0])
    layer = make_model(LlamaConfig(**(SMALL | {"hidden_size": 64, "head_dim": 16}))).model.layers[0]
    generator = torch.Generator().manual_seed(3)
    assert fuse_layer(layer).with_adapter({"self_attn.rotary": (torch.ones(1, 64), torch.ones(64, 1))}) is None
    few = LlamaConfig(**(SMALL | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}))
    shared = make_model(few).model.layers[0]
    slices = adapter_of(shared, {"self_attn.k_proj": 2, "self_attn.v_proj": 2}, generator)
    assert fuse_layer(shared).with_adapter(slices) is None or kernels().panel < 32
    assert narrow.with_adapter({}) is not None


@pytest.mark.parametrize("kind", ["onednn", "native"])
def test_packing_is_a_copy(kind: str) -> None:
    linear = nn.Linear(8, 8)
    packed, states = pack(kind, linear), torch.randn(2, 8)
    before = linear(states)
    nn.init.zeros_(linear.weight)
    torch.testing.assert_close(packed(states), before)


def test_plain_linear_layers_pack() -> None:
    class OwnRun(nn.Linear):
        """What it adds to a linear layer is not known."""

    assert packs(nn.Linear(8, 8)) and not packs(OwnRun(8, 8)) and not packs(nn.Embedding(8, 8))
    assert not packs(nn.Linear(8, 8, dtype=torch.float64)) and not packs(nn.Linear(8, 8, device="meta"))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@torch.inference_mode()
def test_logits_of_fused_layers_stay(compiled, kind: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind).model
    other = fuse(copy.deepcopy(model))
    assert [type(layer) for layer in other.model.layers] == [FusedLayer] * 2
    assert isinstance(other.get_output_embeddings(), PACKED) and count(other, nn.Linear) == 0
    assert_same(other(IDS).logits, model(IDS).logits)
    assert_same(fuse(other)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@torch.inference_mode()
def test_bf16_is_as_near_to_fp32_as_stock_bf16(compiled, kind: str, request: pytest.FixtureRequest) -> None:
    skip_unless_multiplied(torch.bfloat16)
    model = request.getfixturevalue(kind).model
    half, exact = copy.deepcopy(model).to(torch.bfloat16), model(IDS).logits
    far = (half(IDS).logits - exact).norm()
    assert isinstance(fuse(half).model.layers[0], FusedLayer)
    assert (half(IDS).logits - exact).norm() < 1.2 * far


@torch.inference_mode()
def test_an_adapter_stays_and_what_it_adapts_is_packed(lora) -> None:
    other = fuse(copy.deepcopy(lora.model))
    left = [name for name, module in other.named_modules() if type(module) is nn.Linear]
    assert len(left) == 2 * 2 * 7 and all(".lora_" in name for name in left)
    assert count(other, LlamaDecoderLayer) == 2 and count(other, *PACKED) == 2 * 7 + 1
    assert_same(other(IDS).logits, lora.model(IDS).logits)


@torch.inference_mode()
def test_embeddings_that_are_not_contiguous(compiled, llama) -> None:
    other, given = fuse(copy.deepcopy(llama.model)), torch.randn(2, 9, 64)
    for states in (given[:, ::2, :32], given[..., ::2], given[:1, :1, :32].expand(2, 4, 32)):
        assert_same(other(inputs_embeds=states).logits, llama.model(inputs_embeds=states).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_another_dtype_are_not_fused(llama, dtype: torch.dtype) -> None:
    """Stock layers then add up in that dtype; a kernel would read other bits."""
    skip_unless_multiplied(torch.bfloat16)
    half = copy.deepcopy(llama.model).to(torch.bfloat16)
    half.model.layers[0].input_layernorm.to(dtype)
    fuse(half)
    assert type(half.model.layers[0]) is LlamaDecoderLayer


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_norms_that_are_trained_are_not_fused(llama) -> None:
    config = LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"])
    model = get_peft_model(copy.deepcopy(llama.model), config)
    before = model(IDS).logits
    other = fuse(model)
    assert count(other, LlamaDecoderLayer) == 2
    assert_same(other(IDS).logits, before)


def test_a_tied_weight_is_packed_for_the_head_and_kept_for_the_embedding(llama) -> None:
    model = copy.deepcopy(llama.model)
    model.lm_head.weight = model.model.embed_tokens.weight
    before = model(IDS).logits
    other = fuse(model)
    assert isinstance(other.lm_head, PACKED) and type(other.model.embed_tokens) is nn.Embedding
    assert_same(other(IDS).logits, before)


@pytest.mark.parametrize("biased", [LlamaConfig(attention_bias=True, mlp_bias=True, **SMALL), Qwen2Config(**SMALL)])
def test_every_bias_is_kept(compiled, make_model, biased) -> None:
    model = make_model(biased)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    before = model(IDS).logits
    assert isinstance(fuse(model).model.layers[0], FusedLayer)
    assert_same(model(IDS).logits, before)


def test_another_activation_is_packed_and_not_fused(make_model) -> None:
    model = make_model(LlamaConfig(hidden_act="gelu", **SMALL))
    before = model(IDS).logits
    assert count(fuse(model), LlamaDecoderLayer) == 2 and count(model, nn.Linear, FusedLayer) == 0
    assert_same(model(IDS).logits, before)


def test_a_layer_with_a_window_is_packed_and_not_fused(compiled, make_model) -> None:
    """The one before it, which sees all of the context, is fused."""
    model = make_model(Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1, **SMALL))
    before = model(IDS).logits
    assert [type(layer) for layer in fuse(model).model.layers] == [FusedLayer, Qwen2DecoderLayer]
    assert count(model, nn.Linear) == 0
    assert_same(model(IDS).logits, before)


def test_without_the_kernels_linear_layers_are_packed(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "kernels", lambda: None)
    monkeypatch.setattr(library, "kernels", lambda: None)
    other = fuse(copy.deepcopy(llama.model))
    assert count(other, PackedLinear) == 2 * 7 + 1 and count(other, LlamaDecoderLayer) == 2
    assert_same(other(IDS).logits, llama.model(IDS).logits)


def test_what_the_cpu_does_not_multiply_stays_as_it_is(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(model: nn.Module) -> bool:
        before, kinds = model(IDS).logits, [type(module) for module in model.modules()]
        return [type(module) for module in fuse(model).modules()] == kinds and torch.equal(model(IDS).logits, before)

    assert stays(copy.deepcopy(llama.model).to(torch.float64))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert stays(copy.deepcopy(llama.model).to(torch.bfloat16))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert stays(copy.deepcopy(llama.model))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_transformers_generates_the_same(compiled, kind: str, attention: str, request: pytest.FixtureRequest) -> None:
    """Prompts of many lengths in one batch, padded on the left; each answer is the one that its prompt gets alone."""
    subject = request.getfixturevalue(kind)
    known = subject.known[::3]
    longest = max(len(one.prompt) for one in known)
    ids = torch.tensor([[0] * (longest - len(one.prompt)) + list(one.prompt) for one in known])
    mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in known])
    stock = copy.deepcopy(subject.model)
    stock.set_attn_implementation(attention)
    asked = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = stock.generate(input_ids=ids, **asked)
    assert isinstance(fuse(stock).model.layers[0], FusedLayer) and stock.config._attn_implementation == attention
    assert torch.equal(stock.generate(input_ids=ids, **asked), plain)
    assert plain[:, longest:].tolist() == [list(one.answer) for one in known]


@pytest.mark.parametrize("chosen", ["kernels", "onednn", "none"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_what_others_change_in_a_requests_numbers(accelerated, monkeypatch, chosen: str, dtype, most: float) -> None:
    """Nothing where the kernels multiply, bit for bit; where oneDNN does, which rounds a row by how many there are, no
    more than its rounding: the logits reach 10."""
    skip_unless_multiplied(dtype)
    accelerated(chosen)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1536}
    model = small_model("Llama", **(SMALL | sizes)).to(dtype)
    seen, right = [], live_executor.next_tokens

    def noted(logits: torch.Tensor, chunks: list[ScheduledChunk]) -> list[int]:
        seen.extend(row.float() for row, chunk in zip(logits, chunks, strict=True) if chunk.request is asked)
        return right(logits, chunks)

    monkeypatch.setattr(live_executor, "next_tokens", noted)
    engine = Engine(LiveExecutor(fuse(model), blocks=300), EngineConfig(scheduler="sarathi"))
    answers = []
    for others in (0, 40):
        for number in range(others):
            engine.submit(IDS[number % 3, number % 7 :].tolist(), Sampling(12))
        asked = engine.submit(IDS[0].tolist(), Sampling(10))
        engine.run()
        answers.append(torch.stack(seen[-10:]))
    alone, beside = answers
    if kernels() is not None and dtype in kernels().multiplied:
        assert torch.equal(alone, beside)
    parted = (alone.argmax(1) != beside.argmax(1)).nonzero()  # afterwards they answer other words
    until = int(parted[0]) + 1 if len(parted) else len(alone)
    assert float((alone - beside)[:until].abs().max()) <= most
