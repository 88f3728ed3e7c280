"""Weights put into a model that has none: by name and shape, tied or not, with the rotary tables it needs."""

from __future__ import annotations

import pytest
import torch
from edited import set_keys
from transformers import AutoModelForCausalLM

from firsttoken.assets.empty_model import build_on_meta, set_parameter, tie_head
from firsttoken.study.errors import ModelError


@pytest.fixture(params=[("llama", True), ("llama", False), ("qwen2", False)], ids=["tied", "untied", "qwen2"])
def staged(request, stage):
    return stage(*request.param, dtype=torch.bfloat16)


def whole(staged):
    model = build_on_meta(staged.folder, torch.bfloat16)
    for name, tensor in staged.served.model.named_parameters():
        set_parameter(model, name, tensor)
    return model


def test_a_model_without_memory_but_with_its_rotary_tables(staged):
    model = build_on_meta(staged.folder, torch.bfloat16)
    assert not model.training
    assert {(p.device.type, p.dtype, p.requires_grad) for p in model.parameters()} == {("meta", torch.bfloat16, False)}
    stock = AutoModelForCausalLM.from_pretrained(staged.folder)
    buffers, expected = dict(model.named_buffers()), dict(stock.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, expected[name]), name


def test_the_default_dtype_is_left_alone(staged):
    before = torch.get_default_dtype()
    build_on_meta(staged.folder, torch.float16)
    assert torch.get_default_dtype() == before


def test_what_is_put_is_what_computes(staged, ids):
    model = tie_head(whole(staged))
    stock = AutoModelForCausalLM.from_pretrained(staged.folder).eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
    tied = model.config.tie_word_embeddings
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_nothing_is_copied_unless_the_dtype_is_another(staged):
    model = build_on_meta(staged.folder, torch.bfloat16)
    name, ones = "model.norm.weight", torch.ones(32, dtype=torch.bfloat16)
    set_parameter(model, name, ones)
    assert model.model.norm.weight.data_ptr() == ones.data_ptr()
    set_parameter(model, name, torch.full([32], 1.0625).to(torch.float8_e5m2))
    assert model.model.norm.weight.dtype == torch.bfloat16 and model.model.norm.weight[0] == 1


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.norm.bias", [32], "no parameter model.norm.bias"),
        ("model.layers.6.mlp.up_proj.weight", [64, 32], "no parameter model.layers.6.mlp"),
        ("model.layers.0.self_attn.rotary", [4], "no parameter"),
        ("lm_tail.weight", [4], "no parameter lm_tail.weight"),
        ("weight", [4], "no parameter weight"),
        ("", [4], "no parameter"),
        ("model.layers.0.mlp.up_proj.weight", [32, 64], r"has shape \[32, 64\], the model wants \[64, 32\]"),
        ("model.norm.weight", [32, 1], "has shape"),
        ("model.norm.weight", [1], "has shape"),
    ],
)
def test_a_tensor_that_does_not_fit(stage, name, shape, words):
    model = build_on_meta(stage().folder, torch.float32)
    with pytest.raises(ModelError, match=words) as caught:
        set_parameter(model, name, torch.zeros(shape))
    assert "\n" not in str(caught.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_first_missing_parameter_is_named(staged):
    model = whole(staged)
    layer = model.model.layers[3].mlp
    for module in (layer.down_proj, layer.up_proj, model.model.norm):
        module.weight = torch.nn.Parameter(module.weight.to("meta"), requires_grad=False)
    with pytest.raises(ModelError, match=r"3 parameters were never brought, first model\.layers\.3\.mlp\.up_proj"):
        tie_head(model)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        '{"architectures": []}',
        '{"architectures": null}',
        '{"architectures": ["NoSuchModel"]}',
        '{"architectures": ["AutoConfig"]}',
        '{"architectures": [3]}',
    ],
)
def test_a_config_that_names_no_model(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        build_on_meta(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "many"),
        ("hidden_size", 7.5),
        ("num_hidden_layers", None),
        ("num_attention_heads", 0),
        ("num_attention_heads", 3),
        ("rope_parameters", {"rope_type": "none such"}),
        ("architectures", ["GPT2LMHeadModel"]),
    ],
)
def test_a_config_that_no_model_can_be_built_from(stage, key, value):
    folder = stage().folder
    set_keys(folder / "config.json", **{key: value})
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        build_on_meta(folder, torch.float32)
    assert "\n" not in str(caught.value)
