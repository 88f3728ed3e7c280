"""What config.json may say: a shape, a reason to start the other way, or one line that says what is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from edited import config
from transformers import LlamaForCausalLM

from firsttoken.engine.accelerator import build_model
from firsttoken.study.errors import ModelError, NotLean
from firsttoken.study.system.compiled import NONE, accelerator_name
from firsttoken_cpu.lean.lean_config import lean_config

lean_alone = pytest.mark.skipif(accelerator_name() == NONE, reason="nothing starts lean where torch is alone")


def test_the_words_of_transformers_4(make):
    """Its rotary base at the top, and "type" for what became "rope_type"."""
    _, folder = make(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    new = lean_config(folder)
    older = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config(rope_parameters=..., head_dim=..., **older)(folder)
    assert lean_config(folder) == new
    config(rope_scaling=..., num_key_value_heads=...)(folder)
    old = lean_config(folder)
    assert (old.rotary.rope_type, old.num_key_value_heads, old.head_dim) == ("default", 4, 16)


@pytest.mark.parametrize(
    ("family", "keys", "reason"),
    [
        ("Llama", {"architectures": ["MistralForCausalLM"]}, r"its architecture is \['MistralForCausalLM'\]"),
        ("Llama", {"architectures": []}, r"its architecture is \[\]"),
        ("Llama", {"model_type": "qwen2"}, "its model_type is not llama"),
        ("Llama", {"hidden_act": "gelu"}, "its hidden_act is 'gelu'"),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "its rope_type is 'yarn'"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "its rope_parameters have 'partial_rotary_factor'",
        ),
        ("Llama", {"quantization_config": {"bits": 4}}, "its 'quantization_config' is"),
        ("Llama", {"logit_scale": 2.0}, "its 'logit_scale' is 2.0"),
        ("Llama", {"sliding_window": 128}, "its 'sliding_window' is 128"),
        ("Qwen2", {"use_sliding_window": True}, "its use_sliding_window is true"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 3}, "its layer_types are not all full_attention"),
    ],
)
def test_what_starts_the_other_way(make, family, keys, reason):
    _, folder = make(family)
    config(**keys)(folder)
    with pytest.raises(NotLean, match=reason):
        lean_config(folder)


@lean_alone
def test_the_other_way_is_the_stock_model_and_one_line(make, capsys):
    _, folder = make(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    capsys.readouterr()
    assert type(build_model(folder, torch.float32)) is LlamaForCausalLM
    told = capsys.readouterr().err
    assert told == f"firsttoken: {folder.name} starts with transformers' own modules: its rope_type is 'dynamic'\n"


@lean_alone
@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"hidden_size": "many"}, "hidden_size: expected int, not 'many'"),
        ({"hidden_size": -64}, "hidden_size: expected 1 to 1,048,576, not -64"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected 1 to 1,000, not 1000000000"),
        ({"num_hidden_layers": ...}, "missing key 'num_hidden_layers'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_attention_heads": 5, "head_dim": ...}, "hidden_size 64 is no multiple of num_attention_heads 5"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected float, not 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected bool, not 1"),
        ({"rope_parameters": {"rope_theta": -1.0}}, r"rotary\.rope_theta: expected 1e-12 to 1,000,000,000,000"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "missing key 'low_freq_factor'"),
        ({"rope_parameters": ["default"]}, "rope_parameters: expected a mapping"),
    ],
)
def test_a_value_that_no_model_has(make, keys, fault):
    _, folder = make()
    config(**keys)(folder)
    with pytest.raises(ModelError, match=rf"config\.json: .*{fault}.*; copy the model's own") as caught:
        build_model(folder, torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"architectures": NaN}'])
def test_a_file_that_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json.*; copy the model's own") as caught:
        lean_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_engine_and_the_loader_import_neither_transformers_nor_peft():
    """Nor does making an empty model import torch's compiler."""
    code = (
        "import sys, torch, firsttoken.progressiveserve.staged_serving.staged_server\n"
        "import firsttoken.progressiveserve.loading.loader\n"
        "from firsttoken_cpu.lean.lean_model import empty_lean\n"
        "from firsttoken_cpu.lean.lean_config import LeanConfig, Rotary\n"
        "sizes = 9, 8, 8, 1, 2, 1, 4, 64, 1e-6, True, False, False, False\n"
        "config = LeanConfig(('LlamaForCausalLM',), *sizes, Rotary())\n"
        "empty_lean(config, torch.float32)\n"
        "heavy = 'transformers', 'peft', 'pydantic', 'sympy', 'torch._dynamo'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
