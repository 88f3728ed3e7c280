"""Loading models: random shapes, folders, the Hub that is not there, and the pinned one."""

from __future__ import annotations

import pytest
import torch
from edited import set_keys, set_tensors
from peft import LoraConfig, get_peft_model

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import load_model
from firsttoken.assets.shapes import _SHAPES, shape_config
from firsttoken.study.errors import ModelError

MILLIONS = {"smollm2-135m": 135, "tinyllama-1.1b": 1100, "qwen2.5-0.5b": 494, "llama-3.1-8b": 8030, "llama-2-7b": 6738}


@pytest.fixture
def folder(tmp_path):
    """A tiny checkpoint in one file."""
    load_model("random:tiny").model.save_pretrained(tmp_path / "tiny-model")
    return tmp_path / "tiny-model"


@pytest.fixture
def sharded(tmp_path):
    """The same in several shards with an index."""
    load_model("random:tiny").model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


@pytest.mark.parametrize("name", _SHAPES)
def test_shapes_have_the_published_number_of_parameters(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(name))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == MILLIONS.get(name, 0)
    assert len(layers_of(model)) == model.config.num_hidden_layers


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, again, other = (load_model("random:tiny-2", seed=seed).model.state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_random_weights_are_ready_and_say_what_they_are():
    loaded = load_model("random:tiny-3", dtype=torch.bfloat16)
    assert len(layers_of(loaded.model)) == 3
    assert loaded.tokenizer is None
    assert not loaded.model.training
    assert {(p.dtype, p.requires_grad) for p in loaded.model.parameters()} == {(torch.bfloat16, False)}
    assert loaded.provenance.as_dict() == {
        "source": "random:tiny-3, seed 0",
        "sha256": None,
        "dtype": "bfloat16",
        "kind": "random",
        "note": "timing only",
        "licence": "none",
    }


@pytest.mark.parametrize("shape", ["huge", "tiny-1", "tiny-9", "tiny-x", "", "tiny-"])
def test_unknown_shapes(shape):
    with pytest.raises(ModelError, match="no shape is called"):
        load_model(f"random:{shape}")


@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_a_folder_gives_the_same_model(kind, request):
    path = request.getfixturevalue(kind)
    loaded = load_model(str(path), with_tokenizer=False)
    ids = torch.arange(8)[None]
    assert torch.equal(loaded.model(ids).logits, load_model("random:tiny").model(ids).logits)
    assert loaded.provenance.kind == "real"
    assert loaded.provenance.source == path.name, "no path of this machine goes into a result"
    assert len(loaded.provenance.sha256) == 64


def test_the_combined_hash_sees_every_shard(sharded):
    before = load_model(str(sharded), with_tokenizer=False).provenance.sha256
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    set_tensors(shard, lambda held: [tensor.add_(1) for tensor in held.values()])
    assert load_model(str(sharded), with_tokenizer=False).provenance.sha256 != before


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"the shard {shard.name} is missing in {sharded}"):
        load_model(str(sharded))


@pytest.mark.parametrize("keep", [4, 100, -100])
def test_a_truncated_shard_is_named(sharded, keep):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelError, match=f"{shard.name}: it is truncated"):
        load_model(str(sharded))


def test_a_truncated_index(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text()[:50])
    with pytest.raises(ModelError, match=r"index\.json: it is truncated or no JSON"):
        load_model(str(sharded))


def test_a_config_of_fewer_layers_is_refused_instead_of_obeyed(folder):
    """It would load, and answer something else."""
    set_keys(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"holds layer \d+, counted from 0, and config.json says \d+; copy"):
        load_model(str(folder))


def test_folders_that_are_no_checkpoints(folder, tmp_path):
    with pytest.raises(ModelError, match="no model folder"):
        load_model(str(tmp_path / "nowhere"))
    weights, config = folder / "model.safetensors", folder / "config.json"
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has only \.bin weights.*convert them to safetensors"):
        load_model(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no model.safetensors and no model.safetensors.index.json"):
        load_model(str(folder))
    config.unlink()
    with pytest.raises(ModelError, match=r"has no config.json"):
        load_model(str(folder))


def test_the_hub_is_not_there(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"nobody/nothing is not in the Hub's cache.*folder with config.json"):
        load_model("nobody/nothing")
    with pytest.raises(ModelError, match="is no pinned model, folder, Hub id or random:<shape>"):
        load_model("not a name")


def test_a_gated_model_asks_for_the_token(monkeypatch):
    from huggingface_hub.errors import GatedRepoError

    def gated(*args, **kwargs):
        raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    with pytest.raises(ModelError, match=r"is gated.*set HF_TOKEN"):
        load_model("meta-llama/Llama-2-7b-hf")


def test_a_hub_snapshot_is_loaded_like_a_folder(folder, tmp_path, monkeypatch):
    snapshot = folder.rename(tmp_path / "0123abcd")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(snapshot))
    assert load_model("org/name", with_tokenizer=False).provenance.source == "org/name@0123abcd"


def test_layers_are_found_inside_an_adapter_and_refused_elsewhere():
    model = load_model("random:tiny-2").model
    layers = layers_of(model)
    assert layers_of(get_peft_model(model, LoraConfig(target_modules=["q_proj"]))) is layers
    with pytest.raises(ModelError, match=r"Linear has no model.layers"):
        layers_of(torch.nn.Linear(2, 2))


@pytest.mark.assets
def test_the_pinned_model_knows_the_capital_of_france():
    loaded = load_model("smollm2-135m")
    assert loaded.provenance.note == "dequantised from Q4_1"
    assert len(layers_of(loaded.model)) == 30
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"
