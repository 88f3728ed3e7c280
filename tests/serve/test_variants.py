"""LoRA fine-tunes of one model in one engine and one service: each answers as PEFT has it, whoever shares its steps.

Tiny random models in fp32. A token of a variant is the same to the bit whoever shares the step; beside PEFT's own
``generate`` tokens are equal.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from edited import set_keys
from fine_tunes import SHAPE, adapter_in, greedy, shared, tuned, written
from peft_kinds import examine, write
from services import TIMEOUT_S, free_port, said, serving, stage_1_alone, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from waiting import until

from firsttoken.assets.checkpoint import model_files
from firsttoken.engine import shared_base
from firsttoken.engine.block_pool import PrefixSharing
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.lora import Adapter, with_adapter
from firsttoken.engine.request import Request, Sampling
from firsttoken.study.errors import FirstTokenError, ModelError, StageError
from firsttoken_cpu.cpu_accelerator import CPUAccelerator
from firsttoken_cpu.fused import FusedLayer
from firsttoken_cpu.native.library import kernels
from firsttoken_serve.http.launch import running
from firsttoken_serve.service_config import ServiceConfig
from firsttoken_serve.variants import host_variants, read_variants


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SHAPE).eval()


@pytest.fixture(scope="module")
def variants(base, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[nn.Module, Adapter]]:
    """By name, what PEFT makes of the base, and the adapter as it is read."""
    folder = tmp_path_factory.mktemp("adapters")
    made = {
        "all": tuned(base, 1),
        "some": tuned(base, 2, ["q_proj", "up_proj"], rank=2),
        "large": tuned(base, 3, ["v_proj", "down_proj", "o_proj"], rank=9),
    }
    return {name: (peft, adapter_in(written(peft, folder / name))) for name, peft in made.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_each_variant_answers_as_peft_does(base, variants, fused: bool) -> None:
    executor, versions = shared(base, variants)
    if fused:
        list(executor.version.fuse())
        if kernels() is not None:
            layers = [layer for version in versions.values() for layer in version.decoder.segments[0].modules]
            assert all(type(layer) is FusedLayer for layer in layers)
    engine = Engine(executor)
    prompts = {name: [5 + i, 7, 9, 11 + i] for i, name in enumerate(versions)}
    asked = {name: engine.submit(prompt, Sampling(12), version=versions[name]) for name, prompt in prompts.items()}
    engine.run()
    for name, request in asked.items():
        assert request.output == greedy(variants[name][0] if name else base, prompts[name], 12), name
    executor.close()


@pytest.mark.skipif(kernels() is None, reason="no compiler builds the kernels here")
def test_a_step_takes_the_requests_of_all_variants(base, variants, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass, and not one for each; with one of them alone there is nothing to join."""
    passes: list[int] = []

    def counted(self: LiveExecutor, version: Any, step: Any) -> dict[int, int]:
        passes.append(len(step.chunks))
        return said(self, version, step)

    said = LiveExecutor._next_tokens
    monkeypatch.setattr(LiveExecutor, "_next_tokens", counted)
    executor, versions = shared(base, variants)
    list(executor.version.fuse())
    engine = Engine(executor)
    for name in versions:
        engine.submit([5, 6, 7], Sampling(3), version=versions[name])
    engine.run()
    assert passes == [4, 4, 4]
    passes.clear()
    monkeypatch.setattr(CPUAccelerator, "join", lambda *_: (0, None))
    for name in versions:
        engine.submit([5, 6, 7], Sampling(3), version=versions[name])
    engine.run()
    assert passes == [1] * 12
    executor.close()


def test_tokens_of_another_variant_show(base, variants) -> None:
    """Else the tests above would say nothing."""
    prompt = [5, 7, 9, 11]
    answers = [greedy(model, prompt, 12) for model in (base, *(peft for peft, _ in variants.values()))]
    assert len({tuple(answer) for answer in answers}) == 4


@pytest.fixture(scope="module")
def plain_adapters(plain, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, model = tmp_path_factory.mktemp("plain-adapters"), tiny_model()
    return {name: written(tuned(model, seed), folder / name) for seed, name in enumerate(("qa", "chat"))}


def test_a_service_has_each_variant_under_its_name(plain, plain_adapters) -> None:
    model = tiny_model()
    with serving(plain, variants=tuple(plain_adapters.items())) as url:
        listed = [entry["id"] for entry in httpx.get(f"{url}/v1/models").json()["data"]]
        assert listed == ["plain", "qa", "chat"]
        assert httpx.get(f"{url}/v1/models/chat").json()["id"] == "chat"
        prompt = [10, 20, 30, 40]
        names = [None, "plain", "qa", "chat"] * 3
        with ThreadPoolExecutor(len(names)) as clients:
            answers = list(clients.map(lambda name: said(url, prompt, name, 10), names))
        texts = dict(zip(names, answers, strict=True))
        assert answers == [texts[name] for name in names] and texts[None] == texts["plain"]
        assert len(set(texts.values())) == 3
        for name in (None, "qa"):
            body = {"prompt": prompt, "max_tokens": 1} | ({"model": name} if name else {})
            told = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
            assert told["model"] == (name or "plain")
        wrong = httpx.post(f"{url}/v1/completions", json={"model": "other", "prompt": prompt})
        message = wrong.json()["error"]["message"]
        assert (
            wrong.status_code == 404 and message == "model: 'other' is not served here; 'plain' and 'qa' and 'chat' are"
        )
    from services import tiny_tokenizer

    for seed, name in enumerate(("qa", "chat")):
        ids = greedy(tuned(model, seed), prompt, 10)
        assert texts[name] == tiny_tokenizer().decode(ids)


def test_the_last_stage_of_a_model_has_its_variants(tiny, plain, plain_adapters) -> None:
    """Each answers as on the same model that is whole; until that is here, whoever asks for one is told so."""
    prompt, variants = [10, 20, 30, 40], tuple(plain_adapters.items())
    with serving(plain, variants=variants) as url:
        right = [said(url, prompt, name) for name in ("qa", "chat")]
    with stage_1_alone(tiny, variants=variants) as (url, let_come):
        early = httpx.post(f"{url}/v1/completions", json={"model": "qa", "prompt": prompt}, timeout=TIMEOUT_S)
        assert early.status_code == 429 and "qa answers once the whole model is here" in early.text
        let_come()
        until(lambda: httpx.get(f"{url}/stage").json()["state"] == "complete", "all stages are here")
        for _ in range(3):  # also while layers are fused
            with ThreadPoolExecutor(2) as clients:
                assert list(clients.map(lambda name: said(url, prompt, name), ("qa", "chat"))) == right


def without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def cut_off(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_weights, "name a folder with adapter_config.json and adapter_model.safetensors for --variant qa"),
        (cut_off, "adapter of the variant qa"),
        (
            lambda folder: set_keys(folder / "adapter_config.json", use_dora=True),
            "its 'use_dora' True is none of plain LoRA",
        ),
    ],
)
def test_an_adapter_that_cannot_be_read_is_told(plain, tmp_path, spoil, message: str) -> None:
    folder = written(tuned(tiny_model(), 1), tmp_path / "qa")
    spoil(folder)
    with pytest.raises(StageError) as raised:
        read_variants({"qa": folder}, model_files(plain), "cpu")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_salt_keeps_prompts_apart_on_both_paths_and_for_variants(plain, plain_adapters, monkeypatch) -> None:
    shared: list[int] = []
    admitted = PrefixSharing.admitted

    def noted(sharing: PrefixSharing, request: Request, blocks: int) -> None:
        shared.append(blocks)
        admitted(sharing, request, blocks)

    monkeypatch.setattr(PrefixSharing, "admitted", noted)
    prompt, turns = {"prompt": list(range(5, 45))}, [{"role": "user", "content": "a long way from here " * 4}]
    asked = [
        ("completions", prompt),
        ("completions", prompt | {"model": "qa"}),
        ("chat/completions", {"messages": turns}),
    ]
    with serving(plain, share_prefixes=True, variants=tuple(plain_adapters.items())) as url:
        for path, body in asked:
            shared.clear()
            for salt in ("one", None, "two", "one", None):
                salted = body | {"cache_salt": salt, "max_tokens": 4, "temperature": 0}
                assert httpx.post(f"{url}/v1/{path}", json=salted, timeout=TIMEOUT_S).status_code == 200
            assert [blocks > 0 for blocks in shared] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        *(
            (kind, False)
            for kind in ("eva", "rslora", "rank_pattern, expressions", "both patterns, rslora", "bfloat16")
        ),
        *((kind, False) for kind in ("exclude_modules", "two patterns of layers", "keys of 0.5")),
        *((kind, True) for kind in ("pissa", "olora", "alora, called", "alora, not called", "layer_replication")),
        *((kind, True) for kind in ("fewer targets", "loftq", "a key of the future", "a slow expression")),
        ("a module away", True),
    ],
)
def test_an_adapter_of_each_kind_answers_as_with_peft_or_is_refused(base, tmp_path, kind: str, refused: bool) -> None:
    """All kinds: ``adapters_soak.py`` beside this file."""
    assert write(kind, base, tmp_path / "a")
    outcome = examine(base, tmp_path / "a")
    assert not outcome.wrong and bool(outcome.line) == refused


def test_a_variant_that_computes_something_else_is_refused(base, tmp_path, monkeypatch) -> None:
    """A step of it is held to the model's own modules with B A beside their weights."""
    folder = written(tuned(base, 97), tmp_path / "qa")
    base.save_pretrained(tmp_path / "base")

    def doubled(layer: nn.Module, slices: Any) -> nn.Module:
        return with_adapter(layer, {path: (a, 2 * b) for path, (a, b) in slices.items()})

    monkeypatch.setattr(shared_base, "with_adapter", doubled)
    executor = LiveExecutor(copy.deepcopy(base), 16)
    with pytest.raises(ModelError, match="the adapter of the variant qa is another model here than by its own"):
        host_variants(executor, {"qa": folder}, model_files(tmp_path / "base"), "cpu")
    executor.close()


def test_an_adapter_of_another_shape_is_told(base, tmp_path) -> None:
    deep = tiny_model()  # six layers of another width
    executor, _ = shared(base, {})
    with pytest.raises(StageError, match="is for layer 5, and this model has 3; name one that was trained on it"):
        executor.version.variant(executor.model, adapter_in(written(tuned(deep, 1), tmp_path / "deep")))
    wide = LlamaConfig(**(SHAPE.to_dict() | {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}))
    other = AutoModelForCausalLM.from_config(wide)
    with pytest.raises(StageError, match="does not fit this model's layers: train one for this model"):
        executor.version.variant(executor.model, adapter_in(written(tuned(other, 1), tmp_path / "wide")))
    executor.close()


def test_a_model_in_stages_says_at_once_that_an_adapter_does_not_fit(tiny, base, tmp_path) -> None:
    config = ServiceConfig(tiny, port=free_port(), variants=(("qa", written(tuned(base, 1), tmp_path / "qa")),))
    with running(config) as url:
        until(lambda: httpx.get(f"{url}/stage").json()["state"] == "failed", "it gives up")
        assert "does not fit this model's layers" in httpx.get(f"{url}/stage").json()["error"]


@pytest.mark.parametrize("folder", ["plain", "tiny"], ids=["whole", "in stages"])
def test_a_service_whose_variant_cannot_be_read_says_why_and_ends(folder, request, tmp_path) -> None:
    told: list[FirstTokenError] = []
    model = request.getfixturevalue(folder)
    config = ServiceConfig(model, port=free_port(), variants=(("qa", tmp_path / "nowhere"),))
    with pytest.raises(FirstTokenError) as raised, running(config) as url:
        until(lambda: httpx.get(f"{url}/stage").json()["state"] == "failed", "it gives up")
        told.append(FirstTokenError(httpx.get(f"{url}/stage").json()["error"]))
        raise told[0]
    assert "--variant qa" in str(raised.value)
