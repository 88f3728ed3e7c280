"""Sources: the same tensors and side files as what they stand for, and folders that are not what they seem."""

from __future__ import annotations

import json

import pytest
import torch
from edited import config, tensors
from transformers import AutoTokenizer

from firsttoken.assets.models import load_model
from firsttoken.progressiveserve.checkpoint.plan import EMBEDDING, HEAD, NORM
from firsttoken.progressiveserve.checkpoint.sources import FolderSource, ModelSource, Origin, RandomSource
from firsttoken.study.errors import ModelError


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_folder_and_the_model_in_memory_are_the_same_source(saved, kind, tied):
    model, folder = saved(kind, tied, sharded=True)
    stored, held = FolderSource(folder), ModelSource(model, None, Origin("tiny", "5e12" * 16, "real"))
    assert stored.names == held.names and stored.shapes == held.shapes
    assert (stored.names[0], stored.names[-1]) == (EMBEDDING, NORM if tied else HEAD)
    for name in stored.names:
        assert torch.equal(stored.get(name), held.get(name)) and stored.dtype(name) == held.dtype(name)
        assert stored.shapes[name] == stored.get(name).shape
    assert stored.provenance.sha256 == load_model(str(folder), with_tokenizer=False).provenance.sha256
    assert stored.provenance[::2] == (f"{kind}-source", "real")


def test_side_files(saved, tokenizer, tmp_path):
    model, folder = saved(sharded=True)
    (tmp_path / "copied").mkdir()
    FolderSource(folder).write_side_files(tmp_path / "copied")
    expected = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "copied").iterdir()} == expected
    (tmp_path / "written").mkdir()
    ModelSource(model, tokenizer, Origin("tiny", "5e12" * 16, "real")).write_side_files(tmp_path / "written")
    assert {path.name for path in (tmp_path / "written").iterdir()} == expected
    for made in ("copied", "written"):
        config = json.loads((tmp_path / made / "config.json").read_text())
        assert (config["dtype"], config["architectures"]) == ("float32", ["LlamaForCausalLM"])
        assert AutoTokenizer.from_pretrained(tmp_path / made)("the wind").input_ids == tokenizer("the wind").input_ids


def test_random_tensors_depend_on_seed_and_name_alone():
    before = torch.random.get_rng_state()
    source, again = RandomSource("tiny-3", torch.bfloat16, seed=4), RandomSource("tiny-3", torch.bfloat16, seed=4)
    drawn = {name: source.get(name) for name in source.names}
    for name in reversed(again.names):
        assert torch.equal(again.get(name), drawn[name])
        assert drawn[name].dtype == source.dtype(name) == torch.bfloat16 and drawn[name].shape == source.shapes[name]
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [name for name in source.names if not name.endswith("norm.weight")]
    assert len(weights) == len(source.names) - 7
    assert len({drawn[name].flatten()[:8].float().sum().item() for name in weights}) == len(weights)
    for name in source.names:
        if name not in weights:
            assert torch.equal(drawn[name], torch.ones(32, dtype=torch.bfloat16))
    assert drawn[EMBEDDING].float().std().item() == pytest.approx(source.config.initializer_range, rel=0.05)
    assert not torch.equal(RandomSource("tiny-3", torch.bfloat16, seed=5).get(EMBEDDING), drawn[EMBEDDING])
    assert source.provenance == ("random:tiny-3, seed 4, drawn by name", None, "random")
    with pytest.raises(ModelError, match="no shape is called 'tinny'"):
        RandomSource("tinny", torch.float32)


NAME = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "is truncated"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: it is truncated or no JSON"),
        (config(model_type="nonsense"), "model_type: 'nonsense' is not that of LlamaForCausalLM"),
        (config(intermediate_size=65), r"has the shape \[32, 64\], by config.json it has \[32, 65\]"),
        (config(num_hidden_layers=5), "first model.layers.4.self_attn.q_proj.weight; copy the whole"),
        (tensors(lambda t: t.pop(NAME)), f"lacks 1 tensors, first {NAME}"),
        (tensors(lambda t: t.update({NAME: t[NAME].to(torch.int8)})), f"{NAME} .* is stored as I8"),
        (tensors(lambda t: t.update({NAME: t[NAME].double()})), f"{NAME} .* is stored as F64; convert"),
        (
            tensors(lambda t: t.update({k: v.half() if k == NAME else v.bfloat16() for k, v in t.items()})),
            "some weights as F16 and others as BF16; convert all to one",
        ),
        (tensors(lambda t: t.update({HEAD: t[EMBEDDING] + 1})), "not the embedding it is tied to; set"),
        (config(tie_word_embeddings=False), f"lacks 1 tensors, first {HEAD}"),
    ],
)
def test_folders_that_are_refused(saved, damage, words):
    _, folder = saved()
    damage(folder)
    with pytest.raises(ModelError, match=words) as caught:
        FolderSource(folder)
    assert "\n" not in str(caught.value)


def test_a_tied_head_that_is_stored_too_is_left_out(saved):
    _, folder = saved()
    tensors(lambda t: t.update({HEAD: t[EMBEDDING].clone()}))(folder)
    assert HEAD not in FolderSource(folder).names
