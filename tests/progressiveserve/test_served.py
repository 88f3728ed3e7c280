"""The served model in each stage, and that it is whole again after it."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel

from firsttoken.assets.adapters import export_adapter
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.progressiveserve.base_model import ServedConfig, at_stage, load_base, load_served, passing
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.study import paths
from firsttoken.study.errors import ProfileError, StageError
from firsttoken.study.profile import Profile

pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # PEFT warns where adapters pile up


@pytest.fixture
def adapter(served, make_model, randomised, tmp_path):
    """Exports an adapter for the layers that are present in a stage; the same seed gives the same one."""

    def make(stage: int, sha256: str | None = None):
        layers = list(served.plan.present(stage))
        recipe = {"layers": layers, "base_sha256": sha256 or served.sha256, "curve": []}
        return export_adapter(randomised(make_model(layers=6), layers, seed=stage), tmp_path / f"s{stage}", recipe)

    return make


@torch.inference_mode()
def logits(model, ids):
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("healed", [False, True])
def test_a_stage_computes_what_is_present_and_leaves_the_model_whole(served, adapter, make_model, ids, stage, healed):
    original = logits(served.model, ids)
    folder = adapter(stage) if healed else None
    for _ in range(2):
        with at_stage(served, stage, folder) as model:
            passed = {i for i, layer in enumerate(layers_of(model)) if isinstance(layer, PassLayer)}
            assert passed == set(served.plan.missing(stage))
            inside = logits(model, ids)
        assert torch.equal(logits(served.model, ids), original)
    assert not any("lora_" in name for name, _ in served.model.named_modules())
    with passing(make_model(layers=6), served.plan.missing(stage)) as bare:
        expected = logits(PeftModel.from_pretrained(bare, str(folder)) if healed else bare, ids)
    assert torch.equal(inside, expected)
    assert torch.equal(inside, original) == (stage == 3 and not healed)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("healed", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_is_whole_again_when_the_body_raises(served, adapter, ids, stage, healed, error):
    original = logits(served.model, ids)
    with pytest.raises(error), at_stage(served, stage, adapter(stage) if healed else None):
        raise error
    assert torch.equal(logits(served.model, ids), original)
    assert not any("lora_" in name for name, _ in served.model.named_modules())
    with at_stage(served, 1) as model:
        assert not torch.equal(logits(model, ids), original)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_adapter_of_another_stage_is_refused_and_the_model_stays_whole(served, adapter, ids, stage):
    original = logits(served.model, ids)
    with pytest.raises(StageError, match="was trained with layers 0-1, 5 present"), at_stage(served, stage, adapter(1)):
        pytest.fail("it must not be served")
    assert torch.equal(logits(served.model, ids), original)


def test_the_plan_and_the_folder_come_from_the_profile(tmp_path):
    config = ServedConfig(block_start=11, block_size=8, adapters="smollm2-135m")
    assert config.plan(30).b == (11, 12, 13, 14) and config.plan(30).c == (15, 16, 17, 18)
    assert config.folder == paths.ADAPTERS / "smollm2-135m"
    assert ServedConfig(0, 1, str(tmp_path)).folder == tmp_path
    for start, size, says in ((28, 8, "does not fit a model of 30"), (0, 0, "is empty"), (0, 30, "at least one")):
        with pytest.raises(StageError, match=says):
            ServedConfig(start, size, "any").plan(30)


def profile_for(model: str, tmp_path, task: str = "", dtype: str = "float32") -> Profile:
    served = {"block_start": 2, "block_size": 3, "adapters": str(tmp_path / "adapters"), "task_adapter": task}
    return Profile("", model, "cpu", dtype, 0, 1, "test", {"served": served})


@pytest.fixture
def checkpoint(make_model, tokenizer, tmp_path):
    """A base model with its tokenizer in a folder."""
    make_model(layers=6).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_without_a_task_adapter_the_base_is_served(checkpoint, make_model, tmp_path, ids):
    profile = profile_for(checkpoint, tmp_path)
    one, other = load_served(profile), load_base(profile)
    assert one.sha256 == other.sha256 == one.provenance["sha256"]
    assert torch.equal(logits(one.model, ids), logits(make_model(layers=6), ids))
    assert one.plan.block == (2, 3, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_task_adapter_is_merged_and_gives_a_base_of_its_own(
    checkpoint, make_model, randomised, tmp_path, ids, dtype
):
    base = load_base(profile_for(checkpoint, tmp_path))
    peft = randomised(make_model(layers=6), list(range(6)), scale=0.1)
    recipe = {"layers": list(range(6)), "base_sha256": base.sha256, "curve": []}
    export_adapter(peft, tmp_path / "adapters" / "task", recipe)
    tuned = load_served(profile_for(checkpoint, tmp_path, "task", dtype))
    assert not any("lora_" in name for name, _ in tuned.model.named_modules())
    assert {(p.dtype, p.requires_grad) for p in tuned.model.parameters()} == {(getattr(torch, dtype), False)}
    assert not tuned.model.training
    if dtype == "float32":
        torch.testing.assert_close(logits(tuned.model, ids), logits(peft, ids), rtol=2e-3, atol=2e-2)
        assert (logits(tuned.model, ids) - logits(base.model, ids)).abs().max() > 1
    assert tuned.sha256 not in (base.sha256, "")
    assert tuned.sha256 == load_served(profile_for(checkpoint, tmp_path, "task", dtype)).sha256
    export_adapter(randomised(make_model(layers=6), list(range(6)), seed=1), tmp_path / "adapters" / "task", recipe)
    assert tuned.sha256 != load_served(profile_for(checkpoint, tmp_path, "task", dtype)).sha256
    assert tuned.provenance["sha256"] == base.sha256 and tuned.provenance["dtype"] == dtype


def test_a_task_adapter_of_another_base_is_refused(checkpoint, make_model, randomised, tmp_path):
    recipe = {"layers": list(range(6)), "base_sha256": "0dd" * 21 + "0", "curve": []}
    export_adapter(randomised(make_model(layers=6), list(range(6))), tmp_path / "adapters" / "task", recipe)
    with pytest.raises(StageError, match="task belongs to the base 0dd0dd0dd0dd, not"):
        load_served(profile_for(checkpoint, tmp_path, "task"))
    with pytest.raises(StageError, match=r"recipe\.json cannot be read"):
        load_served(profile_for(checkpoint, tmp_path, "elsewhere"))


def test_what_cannot_be_served(tmp_path):
    with pytest.raises(StageError, match="model random:tiny-6 has no tokenizer"):
        load_base(profile_for("random:tiny-6", tmp_path))
    with pytest.raises(ProfileError, match="no section 'served'"):
        load_base(Profile("", "random:tiny", "cpu", "float32", 0, 1, "test", {}))
