"""What config.json may say: a shape, a reason to start the other way, or one line that says what is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from edited import config
from transformers import LlamaForCausalLM

from firsttoken.engine.accelerator import build_model
from firsttoken.study.errors import NotLean
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
    assert (old.rotary[0].rope_type, old.num_key_value_heads, old.head_dim) == ("default", 4, 16)


@pytest.mark.parametrize(
    ("family", "keys", "reason"),
    [
        ("Llama", {"architectures": ["MistralForCausalLM"]}, "its architecture is MistralForCausalLM"),
        ("Llama", {"hidden_act": "gelu"}, "its hidden_act is 'gelu'"),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "its rope_type is 'yarn'"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "its rope_parameters have 'partial_rotary_factor'",
        ),
        ("Llama", {"quantization_config": {"bits": 4}}, "its 'quantization_config' is"),
        ("Llama", {"logit_scale": 2.0}, "its 'logit_scale' is 2.0"),
        ("Llama", {"sliding_window": 128}, "its layers are of 'sliding_attention'"),
        ("Qwen2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "its layers are of 'sliding_att"),
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


def test_the_engine_and_the_loader_import_neither_transformers_nor_peft(make):
    """Nor does making an empty model import torch's compiler."""
    code = (
        "import sys, torch, firsttoken.progressiveserve.staged_serving.staged_server\n"
        "import firsttoken.progressiveserve.loading.loader\n"
        "from pathlib import Path\n"
        "from firsttoken_cpu.lean.lean_model import empty_lean\n"
        "from firsttoken_cpu.lean.lean_config import lean_config\n"
        "empty_lean(lean_config(Path(sys.argv[1])), torch.float32)\n"
        "heavy = 'transformers', 'peft', 'pydantic', 'sympy', 'torch._dynamo'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(make()[1])], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
