"""Our LoRA is PEFT's to the bit, refuses what it does not serve, and shares every weight it does not change."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, save

from firsttoken.assets.adapter_files import CONFIG, WEIGHTS
from firsttoken.engine.lora import parse_adapter, shared_copy, with_adapter
from firsttoken.progressiveserve.base_model import at_stage
from firsttoken.progressiveserve.loading.views import changed, make_view
from firsttoken.progressiveserve.passlayer import PassLayer, pass_layers
from firsttoken.study.errors import StageError


def ends_of(model):
    return {"embed_tokens": model.model.embed_tokens, "norm": model.model.norm, "lm_head": model.lm_head}


def pruned_view(staged, adapter=None, stage=1):
    """The view of ``stage`` of the model in memory."""
    missing = staged.served.plan.missing(stage)
    model = staged.served.model
    base = [PassLayer() if i in missing else layer for i, layer in enumerate(model.model.layers)]
    return make_view(stage, base, ends_of(model), adapter)


@torch.inference_mode()
def answer(model, view, ids):
    before = model.model.layers
    view.activate(model)
    try:
        return model(ids, use_cache=False).logits
    finally:
        model.model.layers = before


@pytest.fixture
def staged(stage):
    return stage(adapters=[1])


@pytest.fixture
def files(staged):
    """The two files of adapter A."""
    return [(staged.adapters[1] / name).read_bytes() for name in (CONFIG, WEIGHTS)]


def with_options(files, **options):
    return json.dumps(json.loads(files[0]) | options).encode(), files[1]


def with_tensors(files, change):
    tensors = load(files[1])
    change(tensors)
    return files[0], save(tensors)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [1, 2])
def test_it_computes_what_peft_computes(stage, ids, kind, dtype, number):
    """Rank 4, alpha 8: a scale of two, which rounds nothing wherever it is applied."""
    staged = stage(kind, dtype=dtype, adapters=[number])
    folder = staged.adapters[number]
    adapter = parse_adapter("A", (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes(), "cpu")
    assert set(adapter.layers) == set(staged.served.plan.present(number))
    assert all(len(slices) == 7 for slices in adapter.layers.values())
    ours = answer(staged.served.model, pruned_view(staged, adapter, number), ids)
    bare = answer(staged.served.model, pruned_view(staged, stage=number), ids)
    with torch.inference_mode(), at_stage(staged.served, number, folder) as model:
        theirs = model(ids, use_cache=False).logits
    assert ours.dtype == dtype and torch.equal(ours, theirs)
    assert (ours - bare).abs().max() > 0.1, "the adapter matters"


@pytest.mark.parametrize("alpha", [3, 5.5, 64])
def test_any_scale_within_rounding(staged, files, ids, alpha):
    files = with_options(files, lora_alpha=alpha)
    ours = answer(staged.served.model, pruned_view(staged, parse_adapter("A", *files, "cpu")), ids)
    (staged.adapters[1] / CONFIG).write_bytes(files[0])
    pass_layers(staged.served.model, staged.served.plan.missing(1))
    with torch.inference_mode():
        theirs = PeftModel.from_pretrained(staged.served.model, staged.adapters[1]).eval()(ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-6 * float(theirs.abs().max()))


def rename(key, new):
    return lambda tensors: tensors.update({new: tensors.pop(key)})


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
OUT = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(Q), "lacks one half of a pair"),
        (lambda tensors: tensors.pop(OUT), "lacks one half of a pair"),
        (rename(Q, "base_model.model.lm_head.lora_A.weight"), "holds 'base_model.model.lm_head.lora_A.weight'"),
        (rename(Q, Q.replace("lora_A.weight", "lora_magnitude_vector")), "which no layer takes"),
        (rename(Q, Q.replace("lora_A", "lora_embedding_A")), "which no layer takes"),
        (lambda tensors: tensors.update({Q: torch.zeros(3, 32)}), r"holds .*\[3, 32\], which no layer takes at rank 4"),
        (lambda tensors: tensors.update({Q: torch.zeros(4)}), "which no layer takes at rank 4"),
        (lambda tensors: tensors.update({Q: torch.zeros(32, 4)}), "which no layer takes at rank 4"),
        (lambda tensors: tensors.update({OUT: torch.zeros(4, 32)}), "which no layer takes at rank 4"),
        (lambda tensors: tensors.update({Q: torch.zeros(1, 4, 32)}), "which no layer takes at rank 4"),
        (lambda tensors: tensors.update({Q: torch.tensor(4.0)}), "which no layer takes at rank 4"),
        (lambda tensors: tensors[Q].fill_(torch.nan), "not finite"),
        (
            lambda tensors: tensors.update({OUT: torch.full((32, 4), torch.finfo(torch.float32).max)}),
            "not finite, or overflow when scaled",
        ),
    ],
)
def test_files_that_hold_something_else(files, change, words):
    with pytest.raises(StageError, match=f"^adapter A: .*{words}") as caught:
        parse_adapter("A", *with_tensors(files, change), "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"alora_invocation_tokens": [1]},
        {"what_comes_next": 1},
        {"peft_type": "IA3"},
        {"peft_type": None},
    ],
    ids=str,
)
def test_variants_that_are_not_served(files, options):
    with pytest.raises(StageError, match=r"adapter A: its .* is none of plain LoRA") as caught:
        parse_adapter("A", *with_options(files, **options), "cpu")
    assert "train a plain one" in str(caught.value)


@pytest.mark.parametrize("config", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe\x00", b"{}", b'{"r": 4}'])
def test_a_config_that_is_not_whole(files, config):
    with pytest.raises(StageError, match=r"^adapter A: .*; copy it again") as caught:
        parse_adapter("A", config, files[1], "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rank", [0, "4", None, [4], 4.5, -4, 1 << 20])
def test_a_rank_that_is_none(files, rank):
    with pytest.raises(StageError):
        parse_adapter("A", *with_options(files, r=rank), "cpu")


@pytest.mark.parametrize("cut", [0, 3, 8, 200, -1])
def test_weights_that_are_not_whole(files, cut):
    with pytest.raises(StageError, match="adapter A: its weights are not whole"):
        parse_adapter("A", files[0], files[1][:cut], "cpu")


@pytest.mark.parametrize(
    ("path", "shapes"),
    [
        ("self_attn.q_proj", ((4, 16), (32, 4))),
        ("self_attn.q_proj", ((4, 32), (16, 4))),
        ("self_attn.none", ((4, 32), (32, 4))),
        ("input_layernorm", ((4, 32), (32, 4))),
        ("mlp", ((4, 32), (32, 4))),
        ("", ((4, 32), (32, 4))),
    ],
)
def test_a_slice_that_does_not_fit_its_layer(make_model, path, shapes):
    layer = make_model().model.layers[0]
    with pytest.raises(StageError, match="does not fit this model's layers"):
        with_adapter(layer, {path: tuple(torch.zeros(shape) for shape in shapes)})


@pytest.mark.parametrize("layer", [2, 5, 99])
def test_an_adapter_for_layers_that_do_not_compute(stage, files, layer):
    """2 is passed in stage 1 of this plan and 99 does not exist; PEFT would drop either without a word."""

    def move(tensors):
        for key in list(tensors):
            tensors[key.replace("layers.5.", f"layers.{layer}.")] = tensors.pop(key)

    files = with_options(files, layers_to_transform=None, layers_pattern=None)
    adapter = parse_adapter("A", *with_tensors(files, move), "cpu")
    staged = stage("qwen2")
    if layer == 5:
        assert len(pruned_view(staged, adapter).layers) == 6
        return
    with pytest.raises(StageError, match=f"layer {layer}"):
        pruned_view(staged, adapter)


def test_the_layer_below_is_as_it_was(staged, files, ids):
    model = staged.served.model
    before = [name for name, _ in model.named_modules()]
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        view = pruned_view(staged, parse_adapter("A", *files, "cpu"))
        answer(model, view, ids)
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert [name for name, _ in model.named_modules()] == before
    assert view.layers[0] is not view.base[0] and view.base[0] is model.model.layers[0]
    assert changed(pruned_view(staged), view).start == 0


def test_a_copy_shares_all_tensors_and_weights_that_come_later(make_model):
    layer = make_model("qwen2").model.layers[1]
    twin = shared_copy(layer)
    assert twin is not layer and [n for n, _ in twin.named_modules()] == [n for n, _ in layer.named_modules()]
    ours, theirs = dict(twin.named_parameters()), dict(layer.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)
    layer.mlp.up_proj._parameters["weight"] = new = torch.nn.Parameter(torch.zeros(64, 32), requires_grad=False)
    assert twin.mlp.up_proj.weight is new
    twin.mlp._modules["act_fn"] = torch.nn.Identity()
    assert not isinstance(layer.mlp.act_fn, torch.nn.Identity)


def test_own_parameters_keep_what_is_put_apart(make_model):
    layer = make_model().model.layers[1]
    twin = shared_copy(layer, own_parameters=True)
    for (name, ours), theirs in zip(twin.named_parameters(), layer.parameters(), strict=True):
        assert ours is theirs, name
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    for module in [module for module in twin.modules() if module._parameters]:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
    assert all(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())
    assert not any(parameter.any() for parameter in twin.parameters())


@pytest.mark.parametrize("own", [False, True])
def test_a_hook_on_a_copy_is_not_one_on_the_original(make_model, ids, own):
    """Gates and watchers are hooks: those of one stage must not fire in another that serves meanwhile."""
    model, seen = make_model(), []
    twin = shared_copy(model.model.layers[1], own_parameters=own)
    handle = twin.register_forward_pre_hook(lambda *_: seen.append("twin"))
    with torch.no_grad():
        model(ids, use_cache=False)
        assert not seen
        model.model.layers[1] = twin
        model(ids, use_cache=False)
    assert seen == ["twin"]
    handle.remove()
