"""Who computed a cache, and who may use it."""

from __future__ import annotations

import copy
import json

import peft
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from firsttoken.assets.models import load_model
from firsttoken.assets.shapes import shape_config
from firsttoken.droidspeak.identity import check_compatible, difference, identify
from firsttoken.study.errors import CacheError

DIFFERENT = {
    "weights": "bb",
    "adapters": "dd",
    "dtype": "bfloat16",
    "architecture": "Qwen2ForCausalLM",
    "layers": 4,
    "kv_heads": 1,
    "head_dim": 4,
    "hidden": 6,
    "rope": json.dumps({"rope_type": "linear"}),
    "tokenizer": "ee",
    "config": json.dumps({"hidden_act": "gelu"}),
    "owner": "alice",
}


def speaker(*words: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(["?", *words])}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", pad_token="?")


def scaled(**rope):
    config = shape_config("tiny-2")
    config.rope_parameters = rope
    return AutoModelForCausalLM.from_config(config)


def test_every_field_makes_another_key(identity):
    keys = {identity().key} | {identity(**{field: value}).key for field, value in DIFFERENT.items()}
    assert len(keys) == len(DIFFERENT) + 1 and all(len(key) == 16 for key in keys)
    assert identity().key == identity().key


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("architecture", r"another architecture \(LlamaForCausalLM, not Qwen2ForCausalLM\)"),
        ("layers", r"another number of layers \(3, not 4\)"),
        ("kv_heads", r"another number of KV heads \(2, not 1\)"),
        ("head_dim", r"another head size \(2, not 4\)"),
        ("hidden", r"another hidden size \(5, not 6\)"),
        ("dtype", r"another dtype \(float32, not bfloat16\)"),
        ("rope", r"another rope scaling \(\{\}, not .*linear"),
        ("tokenizer", r"another tokenizer \(cc, not ee\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(identity, field, reason):
    with pytest.raises(CacheError, match=reason):
        check_compatible(identity(), identity(**{field: DIFFERENT[field]}))


def test_weights_and_adapters_may_differ(identity):
    check_compatible(identity(), identity(weights="bb", adapters="dd"))
    assert difference(identity(), identity(weights="bb")) == ""


def test_the_first_reason_is_the_architecture(identity):
    assert "architecture" in difference(identity(), identity(**DIFFERENT))
    assert "tokenizer (none, not cc)" in difference(identity(tokenizer=""), identity())


def test_a_model_is_described_as_it_is():
    model = load_model("random:tiny-6", dtype=torch.bfloat16).model
    found = identify(model, None, "ff")
    assert (found.architecture, found.dtype, found.tokenizer, found.weights) == (
        "LlamaForCausalLM",
        "bfloat16",
        "",
        "ff",
    )
    assert (found.layers, found.kv_heads, found.head_dim, found.hidden) == (6, 2, 8, 32)


def test_rope_has_one_form_for_each_meaning():
    def rope(**parameters) -> str:
        return identify(scaled(**parameters), None, "").rope

    plain = rope(rope_type="default", rope_theta=10000.0)
    assert rope(rope_theta=10000, rope_type="default") == plain
    assert rope(rope_type="default", rope_theta=10000.0, factor=None) == plain
    assert rope(rope_type="linear", type="linear", factor=2, rope_theta=1e4) == rope(
        rope_type="linear", factor=2.0, rope_theta=10000
    )
    assert (
        len({plain, rope(rope_type="linear", factor=2.0, rope_theta=1e4), rope(rope_type="default", rope_theta=1e5)})
        == 3
    )


def test_another_window_is_another_model_with_the_same_weights(tiny):
    model = tiny(1, 4, "gemma3")
    wider = copy.deepcopy(model)
    wider.config.sliding_window = 32
    with pytest.raises(CacheError, match=r"another rope scaling \(.*\"sliding_window\": 16.0.*, not .*32.0"):
        check_compatible(identify(model, None, "aa"), identify(wider, None, "aa"))


def test_a_wrapped_adapter_has_the_shape_of_its_base():
    model = load_model("random:tiny-2").model
    base = identify(model, None, "aa")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    assert difference(identify(wrapped, None, base.weights, "ab"), base) == ""
    assert identify(wrapped, None, base.weights, "ab").key != base.key


def test_a_tokenizer_is_what_it_makes_of_text_and_not_how_it_was_called_last():
    model = load_model("random:tiny-2").model

    def tokenizer_of(tokenizer) -> str:
        return identify(model, tokenizer, "").tokenizer

    one = speaker("inn", "road")
    before = tokenizer_of(one)
    one(["inn", "inn road"], padding=True, truncation=True, max_length=1)
    assert tokenizer_of(one) == before == tokenizer_of(speaker("inn", "road"))
    assert tokenizer_of(speaker("road", "inn")) != before
    longer = speaker("inn", "road")
    longer.add_tokens(["bridge"])
    assert tokenizer_of(longer) != before
