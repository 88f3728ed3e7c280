"""What a folder's config.json and headers tell of it, before a weight is read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edited import config, tensors
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from firsttoken.assets.checkpoint import EMBEDDING, HEAD
from firsttoken.assets.empty_model import build_on_meta
from firsttoken.assets.model_config import read_config
from firsttoken.assets.servable import attention_kinds, check_servable, model_shapes
from firsttoken.study.errors import ModelError

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**TINY),
    "llama tied": lambda: LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama with biases": lambda: LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama with wide heads": lambda: LlamaConfig(**TINY, head_dim=8),
    "llama without shared heads": lambda: LlamaConfig(**(TINY | {"num_key_value_heads": None})),
    "qwen2": lambda: Qwen2Config(**TINY),
    "qwen2 tied": lambda: Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen2 with unused window": lambda: Qwen2Config(**TINY, use_sliding_window=True, max_window_layers=2),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=None),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that gives the folder of one of ``CONFIGS``, to be read only."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            made[name] = tmp_path_factory.mktemp("saved") / "m"
            AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """The same, to be changed."""
    return lambda name: Path(shutil.copytree(saved(name), tmp_path / "m"))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_told_without_transformers_is_what_transformers_builds(name, saved):
    folder = saved(name)
    built = build_on_meta(folder, torch.float32)
    assert model_shapes(folder, read_config(folder)) == {n: tuple(p.shape) for n, p in built.named_parameters()}
    assert attention_kinds(built.config) == {"full_attention"}
    files = check_servable(folder)
    assert set(files.tensors) == {n for n, _ in built.named_parameters()}


def test_a_folder_is_looked_at_before_torch_is_there(saved):
    folder = saved("qwen2")
    code = (
        "import sys; from pathlib import Path; from firsttoken.assets.servable import check_servable; "
        "check_servable(Path(sys.argv[1])); assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": ...},
            "Qwen2ForCausalLM has layers of sliding_attention",
        ),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layers of chunked_attention"),
        ("llama", {"sliding_window": 16}, "layers of sliding_attention"),
        (
            "mistral",
            {"sliding_window": 16},
            "MistralForCausalLM has layers of sliding_attention, and only models of full",
        ),
        ("mistral", {"sliding_window": ...}, "layers of sliding_attention"),
        ("mistral", {"model_type": "llama"}, "the model_type llama is not that of MistralForCausalLM"),
        ("llama", {"model_type": "qwen2"}, "model_type: 'qwen2' is not that of LlamaForCausalLM"),
        ("llama", {"architectures": ["LlamaModel"]}, "'LlamaModel' is no causal language model"),
        ("llama", {"architectures": ["NobodysForCausalLM"]}, "NobodysForCausalLM was not compared with transformers"),
        ("llama", {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "BloomForCausalLM was not compared"),
        (
            "llama",
            {"is_causal": False},
            "'is_causal' is False, and what that changes is not computed here; use another",
        ),
        ("llama", {"is_causal": None}, "'is_causal' is None"),
        ("qwen2", {"is_causal": False}, "'is_causal' is False"),
        ("mistral", {"is_causal": False}, "'is_causal' is False"),
        ("llama", {"attn_logit_softcapping": 30.0}, "'attn_logit_softcapping' is 30.0"),
        ("llama", {"rope_interleaved": True}, "'rope_interleaved' is True"),
        ("mistral", {"block_configs": [{"attention": "no_op"}]}, "'block_configs' is "),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "'dual_chunk_attention_config' is "),
        ("mistral", {"kv_sharing_modes": None}, "'kv_sharing_modes' is None"),
        ("llama", {"dtype": "float17"}, "dtype: 'float17' is none of weights"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
        ("llama", {"transformers_weights": "other.safetensors"}, "names the file 'other.safetensors'; remove the key"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected bool"),
        ("llama", {"intermediate_size": 25}, r"has the shape \[16, 24\], by config.json it has \[16, 25\]"),
        ("llama", {"attention_bias": True}, "lacks 8 tensors, first model.layers.0.self_attn.q_proj.bias"),
        ("llama tied", {"tie_word_embeddings": False}, f"lacks 1 tensors, first {HEAD}"),
        ("llama tied", {"tie_word_embeddings": ...}, f"lacks 1 tensors, first {HEAD}"),
    ],
)
def test_a_config_that_is_not_served(name, changes, words, copied):
    folder = copied(name)
    config(**changes)(folder)
    with pytest.raises(ModelError, match=words) as caught:
        check_servable(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors, first model.norm.weight; copy the whole checkpoint"),
        (lambda t: t.pop(EMBEDDING), f"lacks 1 tensors, first {EMBEDDING}"),
        (lambda t: t.update({"_orig_mod.x": torch.ones(2)}), "holds '_orig_mod.x', which the model of its config.json"),
        (lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.int8)}), "is stored as I8; convert it to one of F64,"),
        (lambda t: t.update({HEAD: t[HEAD][:-1].clone()}), r"lm_head.weight in .* has the shape \[63, 16\]"),
    ],
)
def test_tensors_that_are_not_served(change, words, copied):
    folder = copied("llama")
    tensors(change)(folder)
    with pytest.raises(ModelError, match=words) as caught:
        check_servable(folder)
    assert "\n" not in str(caught.value) and "staged" not in str(caught.value)


def test_frequencies_of_positions_in_old_files_are_passed_over(copied):
    folder = copied("llama")
    tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))(folder)
    assert len(check_servable(folder).tensors) == 21
