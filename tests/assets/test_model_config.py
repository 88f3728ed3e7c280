"""What config.json may say: a model of known sizes, or one line that names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from edited import config

from firsttoken.__main__ import main
from firsttoken.assets.model_config import read_config
from firsttoken.study.errors import ModelError

SIZES = {"hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "num_key_value_heads": 2}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize(
    ("model", "keys", "fault"),
    [
        (LLAMA, {"hidden_size": "many"}, "hidden_size: expected int, not 'many'"),
        (LLAMA, {"hidden_size": -64}, "hidden_size: expected 1 to 1,048,576, not -64"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers: expected 1 to 1,000, not 1000000000"),
        (LLAMA, {"num_hidden_layers": ...}, "missing key 'num_hidden_layers'"),
        (LLAMA, {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (QWEN2, {"num_key_value_heads": None}, "missing key 'num_key_value_heads'"),
        (LLAMA, {"head_dim": 15}, "head_dim 15 is odd"),
        (LLAMA, {"num_attention_heads": 6}, "hidden_size 64 is no multiple of num_attention_heads 6"),
        (LLAMA, {"rms_norm_eps": "small"}, "rms_norm_eps: expected float, not 'small'"),
        (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings: expected bool, not 1"),
        (LLAMA, {"layer_types": "full_attention"}, "layer_types: expected tuple"),
        (LLAMA, {"rope_theta": -1.0}, r"rope_parameters\.rope_theta: expected 1e-12 to 1,000,000,000,000"),
        (LLAMA, {"rope_parameters": {"rope_theta": 0}}, r"rope_parameters\.rope_theta: expected 1e-12 to"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "missing key 'low_freq_factor'"),
        (LLAMA, {"rope_parameters": {"rope_type": ["llama3"]}}, r"rope_parameters\.rope_type: expected str"),
        (LLAMA, {"rope_parameters": ["default"]}, "rope_parameters: expected a mapping"),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_scaling and rope_parameters differ",
        ),
    ],
)
def test_a_value_that_no_model_has(model: dict[str, Any], keys: dict[str, Any], fault: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    read_config(tmp_path)
    config(**keys)(tmp_path)
    with pytest.raises(ModelError, match=rf"config\.json: .*{fault}.*; copy the model's own") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"architectures": NaN}'])
def test_a_file_that_is_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ModelError, match=r"config\.json.*; copy the model's own|config\.json; a model folder"
    ) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta: expected 1e-12"),
        ({"num_attention_heads": 6}, "hidden_size 64 is no multiple of num_attention_heads 6"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ],
)
def test_every_command_refuses_it_in_one_line(
    keys: dict[str, Any], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it looks for weights, and whatever would compute."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | keys))
    model = ["--profile", "quick", "--set", f"model={folder}"]
    for words in (
        ["serve", folder],
        ["stage", tmp_path / "staged", *model],
        ["measure", "generation_stalls", *model],
        ["swarm", "serve", "--model", folder, "--blocks", "0:1"],
    ):
        assert main([str(word) for word in words]) == 2, words
        out, err = capsys.readouterr()
        assert fault in err and err.count("\n") == 1, (words, out, err)
