"""Models of a pair by name: adapters merged, folders as they are, half of the layers, and how far two are apart."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from plain_tokens import check_greedy, generated

from firsttoken.assets.adapter_files import WEIGHTS
from firsttoken.assets.models import load_model
from firsttoken.study import paths
from firsttoken.study.errors import ModelError, ProfileError, StageError
from firsttoken.study.profile import Profile, load_profile
from firsttoken_studies.droidspeak.pairs import Models, Pair, adapters_folder, half_the_layers, weight_distance
from firsttoken_studies.droidspeak.reuse_items import Encoded, TaskItem
from firsttoken_studies.nb30_full_reuse_and_sensitivity.training import TuningConfig, tuned

IDS = torch.randint(1, 257, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def adapters(folders, tmp_path_factory) -> Path:
    """Adapters "task" of the base and "half-task" of its half, trained for a few steps."""
    root = tmp_path_factory.mktemp("adapters")
    items = [Encoded(TaskItem("0", "qa", "", "", ("",)), [i, i + 1], [5], [9, 3]) for i in range(1, 9)]
    config = TuningConfig(rank=4, learning_rate=3e-2, steps=6, batch=2, tokens=2, items=0)
    for name in ("task", "half-task"):
        base = load_model(str(folders / "base"))
        model = half_the_layers(base.model) if name.startswith("half") else base.model
        tuned(root / name, model, base.provenance.sha256, {"qa": items}, config)
    return root


def profile(folders, **changes) -> Profile:
    return load_profile("quick", **{"model": str(folders / "base"), "dtype": "float32", "device": "cpu"} | changes)


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("text", ["a <- b", "  a<-b ", "meta/a-1.5 <- /somewhere/b c"])
def test_pairs_are_read(text):
    pair = Pair.parse(text)
    assert [pair.receiver, pair.sender] == [part.strip() for part in text.split("<-")]


@pytest.mark.parametrize("text", ["", "a", "a <-", "<- b", "a -> b", "a < - b"])
def test_what_is_no_pair_is_refused(text):
    with pytest.raises(ProfileError, match="write it as 'receiver <- sender'") as caught:
        Pair.parse(text)
    assert repr(text) in str(caught.value)


def test_folders_show_by_their_last_part(folders):
    pair = Pair(str(folders / "base"), "org/name")
    assert str(pair) == "base <- org/name"


def test_a_merged_adapter_is_the_peft_model(folders, adapters):
    merged = Models(profile(folders), str(adapters)).load("task")
    base = load_model(str(folders / "base")).model
    plain = logits(base)
    peft = PeftModel.from_pretrained(base, str(adapters / "task")).eval()
    torch.testing.assert_close(logits(merged.model), logits(peft), rtol=1e-4, atol=1e-4)
    assert (logits(merged.model) - plain).abs().max() > 0.1, "the adapter must show"
    assert not merged.model.training and not any(w.requires_grad for w in merged.model.parameters())
    assert not [name for name, _ in merged.model.named_modules() if "lora" in name]


def test_a_merged_adapter_of_the_half(folders, adapters):
    half = Models(profile(folders), str(adapters)).load("half-task")
    assert half.model.config.num_hidden_layers == len(half.model.model.layers) == 2
    peft = PeftModel.from_pretrained(
        half_the_layers(load_model(str(folders / "base")).model), str(adapters / "half-task")
    )
    torch.testing.assert_close(logits(half.model), logits(peft.eval()), rtol=1e-4, atol=1e-4)


def test_sixteen_bits_are_rounded_once_and_angles_not_at_all(folders, adapters):
    exact, low = (
        Models(profile(folders, dtype=dtype), str(adapters)).load("task").model for dtype in ("float32", "bfloat16")
    )
    assert low.dtype == torch.bfloat16
    for (name, weight), rounded in zip(exact.named_parameters(), low.parameters(), strict=True):
        assert torch.equal(weight.to(torch.bfloat16), rounded), name
    assert torch.equal(low.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)
    assert logits(low).isfinite().all()


def test_models_are_loaded_once_and_say_where_they_come_from(folders, adapters):
    models = Models(profile(folders), str(adapters))
    assert models.load("task") is models.load("task")
    base, other = models.load("base"), models.load(str(folders / "other"))
    assert list(models.provenance) == ["task", "base", "other"]
    assert str(folders) not in json.dumps(models.provenance)
    assert "tuned to qa" in models.provenance["task"]["note"]
    keys = {variant.identity.key for variant in (base, other, models.load("task"))}
    assert len(keys) == 3
    base.check_sender(other)
    other.check_sender(models.load("task"))
    assert (base.weights, base.adapter) == (models.load("task").weights, "")


def test_an_adapter_of_another_base_is_refused(folders, adapters):
    models = Models(profile(folders, model=str(folders / "other")), str(adapters))
    with pytest.raises(ModelError, match=r"adapter task belongs to the base .*train it for this one"):
        models.load("task")


def test_an_adapter_without_its_recipe_is_refused(folders, adapters, tmp_path):
    shutil.copytree(adapters / "task", tmp_path / "task")
    (tmp_path / "task" / "recipe.json").write_text('{"base_sha')
    with pytest.raises(StageError, match=r"recipe.json: it is truncated or no JSON"):
        Models(profile(folders), str(tmp_path)).load("task")
    assert (tmp_path / "task" / WEIGHTS).is_file()


def test_an_adapter_that_is_not_there_is_named_and_no_hub_is_asked(folders, adapters, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(ModelError, match=r"'missing-one' is no adapter in .* and no model; train it"):
        Models(profile(folders), str(adapters)).load("missing-one")


def test_adapters_lie_below_data_or_where_a_path_says(tmp_path):
    assert adapters_folder("some/reuse") == paths.ADAPTERS / "some/reuse"
    assert adapters_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("depth", [4, 5])
def test_half_the_layers_is_a_model_of_its_own(tiny, kind, depth):
    whole = tiny(1, depth, kind)
    half = half_the_layers(copy.deepcopy(whole))
    kept = range(0, depth, 2)
    assert half.config.num_hidden_layers == len(kept) and half.model.config.num_hidden_layers == len(kept)
    assert [layer.self_attn.layer_idx for layer in half.model.layers] == list(range(len(kept)))
    expected = copy.deepcopy(tiny(2, len(kept), kind))
    renamed = {}
    for name, weight in whole.state_dict().items():
        parts = name.split(".")
        if parts[1] == "layers":
            if int(parts[2]) % 2:
                continue
            parts[2] = str(int(parts[2]) // 2)
        renamed[".".join(parts)] = weight
    expected.load_state_dict(renamed)
    ids = IDS % 256
    with torch.inference_mode():
        assert torch.equal(half(ids).logits, expected(ids).logits)
        cache = half(ids[:, :5], use_cache=True).past_key_values
        assert len(cache.layers) == len(kept) and cache.get_seq_length() == 5
        torch.testing.assert_close(
            half(ids[:, 5:], past_key_values=cache).logits, expected(ids).logits[:, 5:], rtol=1e-4, atol=1e-4
        )
    for prompt in ids.tolist():
        assert check_greedy(generated(half, prompt, 4).tokens, generated(expected, prompt, 4)) == 4
    assert len(whole.model.layers) == depth


def test_distance(tiny):
    one = tiny(1, 3)
    assert weight_distance(one, one) == 0
    other = copy.deepcopy(one)
    for weight in other.model.layers[1].parameters():
        weight.mul_(1.5)
    for weight in other.model.layers[2].parameters():
        weight.neg_()
    other.lm_head.weight.zero_()  # only what makes keys and values counts
    norms = [sum(w.double().square().sum().item() for w in layer.parameters()) for layer in one.model.layers]
    apart, others = 0.25 * norms[1] + 4 * norms[2], norms[0] + 2.25 * norms[1] + norms[2]
    assert weight_distance(other, one) == pytest.approx((apart / sum(norms)) ** 0.5)
    assert weight_distance(one, other) == pytest.approx((apart / others) ** 0.5)
