"""Adapters on disk: what plain PEFT makes of them, what lies in the folder, and which pairings are refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from edited import set_keys, set_tensors
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from firsttoken.assets import adapters
from firsttoken.assets.adapter_files import WEIGHTS, read_recipe
from firsttoken.assets.adapters import export_adapter
from firsttoken.progressiveserve.passlayer import pass_layers, restore_layers
from firsttoken.progressiveserve.recipe import SEVEN_PROJECTIONS
from firsttoken.progressiveserve.stage_adapters import check_fit, load_adapter
from firsttoken.study.errors import StageError

LAYERS, MISSING, BASE = [0, 1, 5], [2, 3, 4], "ba5e" * 16
RECIPE = {
    "layers": LAYERS,
    "base_sha256": BASE,
    "seed": 0,
    "data": {"questions": "towns"},
    "curve": [{"step": 1, "answer_loss": 2.5}, {"step": 2, "answer_loss": 1.25}],
}
FP16 = {"rtol": 2e-3, "atol": 5e-2}  # 11 bits of each weight, over six layers, on logits of magnitude 10


@pytest.fixture
def folder(tmp_path, make_model) -> Path:
    """A base checkpoint in a folder, so that there is a path that must not leak."""
    make_model(layers=6).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def trained(folder, randomised):
    """An adapter in a model whose layers 2 to 4 are passed, with the layers that stood there."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    removed = pass_layers(model, MISSING)
    return randomised(model, LAYERS), removed


@pytest.fixture
def exported(trained, tmp_path) -> Path:
    """The same adapter as a folder."""
    return export_adapter(trained[0], tmp_path / "adapters" / "A-test", RECIPE)


def one_line(caught: pytest.ExceptionInfo) -> bool:
    return "\n" not in str(caught.value)


@torch.inference_mode()
def test_plain_peft_loads_it_on_the_staged_and_on_the_full_model(trained, exported, folder, ids):
    peft, removed = trained
    staged = AutoModelForCausalLM.from_pretrained(folder).eval()
    pass_layers(staged, MISSING)
    bare, expected = staged(ids).logits, peft(ids).logits
    loaded = PeftModel.from_pretrained(staged, str(exported)).eval()
    torch.testing.assert_close(loaded(ids).logits, expected, **FP16)
    assert (expected - bare).abs().max() > 1, "the adapter matters"

    restore_layers(peft, removed)
    full = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(exported)).eval()
    torch.testing.assert_close(full(ids).logits, peft(ids).logits, **FP16)
    touched = {int(name.split("layers.")[1].split(".")[0]) for name, _ in full.named_parameters() if "lora_" in name}
    assert touched == set(LAYERS)


def test_the_folder_holds_16_bit_weights_and_nothing_of_this_machine(exported, trained, tmp_path):
    assert {path.name for path in exported.iterdir()} == {"adapter_config.json", WEIGHTS, "recipe.json"}
    weights = load_file(exported / WEIGHTS)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert len(weights) == len(LAYERS) * 7 * 2
    assert (exported / WEIGHTS).stat().st_size < 2 * sum(t.numel() for t in weights.values()) + 16_000

    for path in exported.glob("*.json"):
        texts = re.findall(r'"([^"]*)"', path.read_text())
        assert not [text for text in texts if text.startswith(("/", "~")) or str(tmp_path) in text], path.name
    config = json.loads((exported / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(SEVEN_PROJECTIONS), "PEFT keeps a set, in another order each time"
    assert trained[0].peft_config["default"].base_model_name_or_path == str(tmp_path / "base"), "there was one to hide"


def test_the_recipe_comes_back_and_its_curve_has_a_line_a_step(exported):
    assert read_recipe(exported) == RECIPE
    lines = (exported / "recipe.json").read_text().splitlines()
    assert sum('"step"' in line for line in lines) == 2


def test_an_adapter_is_written_the_same_every_time(trained, exported, tmp_path):
    again = export_adapter(trained[0], tmp_path / "elsewhere" / "A-test", RECIPE)
    for path in exported.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_newer_adapter_takes_the_place_of_the_old_one(trained, exported):
    (exported / "left-over").write_text("old")
    export_adapter(trained[0], exported, RECIPE | {"seed": 1})
    assert read_recipe(exported)["seed"] == 1
    assert not (exported / "left-over").exists()
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


@pytest.mark.parametrize("at", ["save_file", "write_text", "_dump"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk full", "interrupted"])
def test_an_interrupted_export_leaves_nothing_under_the_final_name(trained, tmp_path, monkeypatch, at, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(adapters, at, fail)
    with pytest.raises(type(error)):
        export_adapter(trained[0], tmp_path / "adapters" / "A-test", RECIPE)
    assert list((tmp_path / "adapters").iterdir()) == []


def test_an_interrupted_export_leaves_the_older_adapter(trained, exported, monkeypatch):
    before = {path.name: path.read_bytes() for path in exported.iterdir()}

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(adapters, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export_adapter(trained[0], exported, RECIPE | {"seed": 1})
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


@pytest.mark.parametrize("layers", [[0, 1, 2, 3, 5], [0, 1], [1, 0, 5], range(6), []])
def test_other_layers_are_refused(exported, layers):
    with pytest.raises(StageError, match=r"A-test was trained with layers 0-1, 5 present, this stage has") as caught:
        check_fit(exported, layers, BASE)
    assert one_line(caught)


@pytest.mark.parametrize("base", ["0dd" * 20, "", None])
def test_another_base_is_refused(exported, base):
    with pytest.raises(StageError, match=r"A-test belongs to the base ba5eba5eba5e, not ") as caught:
        check_fit(exported, LAYERS, base)
    assert one_line(caught)


def test_a_truncated_set_of_layers_is_refused(exported, make_model):
    set_tensors(exported / WEIGHTS, lambda held: [held.pop(name) for name in list(held) if ".layers.5." in name])
    model = make_model(layers=6)
    with pytest.raises(StageError, match=r"A-test holds weights for layers 0-1 only: copy it again") as caught:
        load_adapter(model, exported, LAYERS, BASE)
    assert one_line(caught)
    assert not hasattr(model, "peft_config"), "refused before anything is attached"


def test_a_module_that_lacks_in_one_layer_is_refused(exported):
    part = ".layers.5.mlp.up_proj."
    set_tensors(exported / WEIGHTS, lambda held: [held.pop(name) for name in list(held) if part in name])
    with pytest.raises(StageError, match=r"A-test: mlp\.up_proj of layer 5 has no weights; copy it again") as caught:
        check_fit(exported, LAYERS, BASE)
    assert one_line(caught)


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES = {
    "no recipe": lambda folder: (folder / "recipe.json").unlink(),
    "half a recipe": lambda folder: half(folder / "recipe.json"),
    "somebody's recipe": lambda folder: (folder / "recipe.json").write_text('{"r": 8}'),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "half the weights": lambda folder: half(folder / WEIGHTS),
    "no configuration": lambda folder: (folder / "adapter_config.json").unlink(),
    "another rank": lambda folder: set_keys(folder / "adapter_config.json", r=2),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_one_clear_line_that_names_it(exported, make_model, damage):
    damage(exported)
    with pytest.raises(StageError, match="A-test") as caught:
        load_adapter(make_model(layers=6), exported, LAYERS, BASE)
    assert one_line(caught)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(StageError, match=r"A-none/recipe.json cannot be read: No such file .*; train it") as caught:
        check_fit(tmp_path / "A-none", LAYERS, BASE)
    assert one_line(caught)


def test_exporting_changes_nothing_in_the_model(trained, tmp_path, ids):
    peft, _ = trained
    before, config = peft(ids).logits, copy.deepcopy(peft.peft_config["default"])
    export_adapter(peft, tmp_path / "A-x", RECIPE)
    assert torch.equal(peft(ids).logits, before)
    assert {p.dtype for p in peft.parameters()} == {torch.float32}
    assert peft.peft_config["default"].target_modules == config.target_modules
