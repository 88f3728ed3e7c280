"""Up to the context that is told, a token's rotary angles are the same whatever else is in the forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rotary import CONTEXT, MOST, ROTARY, TRAINED
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from firsttoken.assets.model_config import ModelConfig, read_config
from firsttoken.assets.positions import BY_LENGTH, FIXED, context_of, kinds_by_length, shortened
from firsttoken.study.errors import ModelError

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": MOST}
SIZES = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}


def read(folder: Path, **keys: Any) -> ModelConfig:
    """The config.json of these keys in ``folder``."""
    (folder / "config.json").write_text(json.dumps(SIZES | SHAPE | keys))
    return read_config(folder)


@pytest.mark.parametrize("name", ROTARY)
def test_no_token_is_turned_by_its_neighbours(name: str, tmp_path: Path) -> None:
    """transformers' own angles, for each position alone and beside every other length up to the context."""
    config = LlamaConfig(**SHAPE, **ROTARY[name])
    most = context_of(config)
    assert most == CONTEXT[name] == context_of(read(tmp_path, **ROTARY[name]))
    rotary, like = LlamaRotaryEmbedding(config), torch.empty(1, 1, 1)
    alone = torch.cat([torch.stack(rotary(like, torch.tensor([[place]]))) for place in range(most)], 2)
    for tokens in (1, 2, most // 2, most):
        torch.testing.assert_close(torch.stack(rotary(like, torch.arange(tokens)[None])), alone[:, :, :tokens])
    if kinds_by_length(config):  # and one token more would turn all the others
        beyond = torch.stack(rotary(like, torch.arange(most + 2)[None]))[:, :, :most]
        assert not torch.allclose(beyond, alone)


def test_every_kind_of_transformers_is_known() -> None:
    """A kind that a later version brings is looked at before it is run."""
    assert {"default", *ROPE_INIT_FUNCTIONS} == {*FIXED, *BY_LENGTH}


@pytest.mark.parametrize("keys", [{"rope_parameters": {"rope_type": "su"}}, {"rope_scaling": {"type": "su"}}])
def test_an_unknown_kind_is_refused_by_name(keys: dict, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: .*rotary positions of the kind 'su'.* known: default, linear"):
        read(tmp_path, **keys)


def test_layers_of_several_kinds_go_as_far_as_the_shortest() -> None:
    by_layers = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": TRAINED},
        "sliding_attention": {"rope_type": "default"},
    }
    config = SimpleNamespace(model_type="mixed", max_position_embeddings=MOST, rope_parameters=by_layers)
    assert context_of(config) == TRAINED and kinds_by_length(config) == ["longrope"]
    by_layers["full_attention"]["rope_type"] = "other"
    with pytest.raises(ModelError, match="the mixed model has rope_parameters: rotary positions of the kind 'other'"):
        context_of(config)


@pytest.mark.parametrize("length", [0, -1, 2.5, "64", True, None])
def test_a_length_that_is_none_is_refused(length: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the own model has max_position_embeddings: expected"):
        context_of(SimpleNamespace(model_type="own", max_position_embeddings=length))
    if length is not None:
        longrope = {"rope_type": "longrope", "original_max_position_embeddings": length}
        with pytest.raises(ModelError, match=r"rope_parameters\.original_max_position_embeddings: expected"):
            read(tmp_path, rope_parameters=longrope)


def test_a_model_without_rotary_positions_has_its_context() -> None:
    assert context_of(SimpleNamespace(model_type="learned", max_position_embeddings=MOST)) == MOST


@pytest.mark.parametrize("name", ROTARY)
def test_who_serves_is_told_of_a_shorter_context(name: str, tmp_path: Path) -> None:
    told = shortened(read(tmp_path, **ROTARY[name]), "m")
    assert (f"is run with {TRAINED} of its {MOST} tokens" in told) == name.startswith("longrope") == bool(told)
