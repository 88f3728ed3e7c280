"""Families of models, tiny and random, through serve, stage and a swarm; and what config.json may hold beside them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from edited import config
from families import LAYERS, WAYS, architectures, examine, write_family
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from firsttoken.assets import known_models
from firsttoken.assets.empty_model import stock_config
from firsttoken.assets.known_models import FIELDS, check_family, is_silent
from firsttoken.assets.servable import check_attention
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.study.errors import ModelError
from firsttoken_cpu.lean.lean_config import lean_config

CLASSES = architectures()
SPANNED = [
    kind for kind, name in CLASSES.items() if name.removesuffix("ForCausalLM") in known_models._FAMILIES["spans"]
]
EVERYWHERE, ALONE = dict.fromkeys(WAYS, True), {"serve": True, "stage": False, "swarm": False}
NOWHERE = dict.fromkeys(WAYS, False)
CHOSEN = {
    **{"smollm3": EVERYWHERE, "gemma": EVERYWHERE, "granite": EVERYWHERE, "phi3": EVERYWHERE},
    **{"starcoder2": EVERYWHERE | {"stage": False}, "mixtral": ALONE, "gemma3_text": ALONE},
    **{"diffllama": NOWHERE, "deepseek_v3": NOWHERE, "jetmoe": NOWHERE, "stablelm": NOWHERE, "gpt_oss": NOWHERE},
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_family_answers_as_transformers_does_or_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    outcomes = dict(examine(write_family(kind, tmp_path / "m")))
    assert {way: outcome.wrong for way, outcome in outcomes.items() if outcome.wrong} == {}
    assert {way: bool(outcome.equal) for way, outcome in outcomes.items()} == CHOSEN[kind]
    for outcome in outcomes.values():
        assert outcome.equal or (f"{CLASSES[kind]} " in outcome.line and "; use one of Arcee, " in outcome.line)


@pytest.mark.parametrize("kind", SPANNED)
def test_a_span_that_begins_in_the_middle_is_that_part_of_the_model(kind: str, tmp_path: Path) -> None:
    """Within 1e-4 of what transformers' whole model has behind its last layer: rounding gives 4e-6."""
    folder = write_family(kind, tmp_path / "m")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    states: dict[int, torch.Tensor] = {}
    for number in (3, LAYERS - 1):
        stock.model.layers[number].register_forward_hook(
            lambda module, args, out, number=number: states.update({number: torch.stack([args[0], out])})
        )
    tokens = 20
    with torch.inference_mode():
        stock(torch.arange(7, 7 + tokens)[None], use_cache=False)
    backend = BlockBackend(folder, range(3, LAYERS), torch.float32, 64)
    request = Request(0, range(tokens), Sampling(1), 0.0)
    request.blocks = [2, 0]
    entering, parts = states[3][0, 0], []
    for start, end in ((0, 17), (17, 18), (18, tokens)):
        chunk = ScheduledChunk(request, start, end, start)
        parts += backend.run(backend.blocks, [chunk], [entering[start:end]])
    assert torch.cat(parts) == pytest.approx(states[LAYERS - 1][1, 0], abs=1e-4)


def test_every_family_of_the_lists_is_one_of_transformers_and_of_the_page() -> None:
    page = (Path(known_models.__file__).parents[2] / "firsttoken_serve" / "README.md").read_text()
    for family in known_models._FAMILIES["alone"]:
        assert family in page
        assert hasattr(transformers, f"{family}ForCausalLM")
        check_family(f"{family}ForCausalLM")
    with pytest.raises(ModelError, match=r"^Llama was not compared"):
        check_family("Llama")


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
def test_the_keys_that_are_known_without_transformers_are_its_fields(kind: type) -> None:
    names = {one.name for one in fields(kind)} - {"layer_types"}
    read = {name for name in names if not is_silent(name, True)}
    assert FIELDS[kind().architectures[0] if kind().architectures else f"{kind.__name__[:-6]}ForCausalLM"] == {
        name for name in read if name not in ("head_dim", "rope_parameters", "sliding_window", "is_encoder_decoder")
    }


_OLD = {"_name_or_path": "x/y", "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True}
_OLD |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "rope_theta": 10000.0, "hidden_act": "silu"}
_LLAMA = _OLD | {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1}
_QWEN = _OLD | {"attention_dropout": 0.0, "max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False}
_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2": (
        "llama",
        _LLAMA
        | {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None}
        | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "TinyLlama": ("llama", _LLAMA | {"rope_scaling": None}),
    "Llama-2": ("llama", _OLD | {"pretraining_tp": 1, "rope_scaling": None, "_attn_implementation": "sdpa"}),
    "Llama-3 by unsloth": ("llama", _LLAMA | {"unsloth_version": "2024.9", "unsloth_fixed": True, "pad_token_id": 0}),
    "Llama-3.1": (
        "llama",
        _LLAMA
        | {"eos_token_id": [1, 2], "head_dim": 8, "rope_theta": 500000.0}
        | {
            "rope_scaling": {
                **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                **{"original_max_position_embeddings": 64, "rope_type": "llama3"},
            }
        },
    ),
    "Falcon3": ("llama", _LLAMA | {"activation": "swiglu", "head_dim": 8}),
    "Vicuna": ("llama", _OLD | {"max_sequence_length": 2048, "pretraining_tp": 1}),
    "Qwen2.5": ("qwen2", _QWEN),
    "R1 distilled": ("qwen2", _QWEN | {"use_mrope": False, "max_window_layers": 21}),
    "Qwen3": ("qwen3", _QWEN | {"attention_bias": False, "head_dim": 8, "sliding_window": None, "rope_scaling": None}),
    "Mistral": ("mistral", _OLD | {"attention_dropout": 0.0, "sliding_window": None, "head_dim": 8}),
    "Gemma": ("gemma", _OLD | {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 8}),
    "Phi-4-mini": (
        "phi3",
        _OLD
        | {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}, "attention_bias": False}
        | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
        | {"mlp_bias": False, "original_max_position_embeddings": 64, "rope_scaling": None, "sliding_window": None},
    ),
    "OLMo-2": ("olmo2", _OLD | {"attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None}),
    "Granite": (
        "granite",
        _OLD
        | {"attention_bias": False, "attention_multiplier": 0.1, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
        | {"residual_multiplier": 0.22, "mlp_bias": False, "rope_scaling": None},
    ),
    "SmolLM3": ("smollm3", _LLAMA | {"_attn_implementation_autoset": True, "no_rope_layer_interval": 4}),
    "an old writer": (
        "mistral",
        _OLD
        | {"is_decoder": False, "pruned_heads": {}, "torchscript": False, "chunk_size_feed_forward": 0, "top_k": 50}
        | {"sliding_window": None}
        | {"add_cross_attention": False, "temperature": 1.0, "tie_encoder_decoder": False, "bad_words_ids": None},
    ),
}
_SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_what_is_published_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    """Keys as the ecosystem writes them; and each of them is refused once one more is there that nobody knows."""
    kind, keys = _PUBLISHED[name]
    (tmp_path / "config.json").write_text("{}")
    sizes = _SIZES | ({"rms_norm_eps": 1e-5} if kind in ("llama", "qwen2") else {})
    told = {"architectures": [CLASSES[kind]], "model_type": kind, **sizes, **keys}
    config(**told)(tmp_path)
    check_attention(tmp_path, "stages")
    if kind in ("llama", "qwen2"):
        lean_config(tmp_path)
    stock_config(tmp_path)
    config(heads_of_its_own=[1, 2])(tmp_path)
    for read in (check_attention, stock_config):
        with pytest.raises(ModelError, match=r"config\.json: 'heads_of_its_own' is .*, and what that changes"):
            read(tmp_path)
