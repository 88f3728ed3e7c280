"""What one fine-tune's requests have computed, as another takes it in the same engine. Tiny random models, fp32."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from fine_tunes import SHAPE, adapter_in, greedy, shared, tuned, written
from plain_tokens import check_greedy, judged
from torch import nn
from transformers import AutoModelForCausalLM

from firsttoken.droidspeak.identity import ModelIdentity, identify
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.droidspeak.source import StoredPrefix, served_prefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.request import Sampling
from firsttoken.study.errors import RequestError

EDGE, CLOSE = 1, {"rtol": 0.0, "atol": 1e-4}
NAMES = ("writer", "reader")


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SHAPE).eval()


@pytest.fixture(scope="module")
def variants(base, tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("adapters")
    made = {name: tuned(base, seed) for seed, name in enumerate(NAMES)}
    return {name: (peft, adapter_in(written(peft, folder / name))) for name, peft in made.items()}


@pytest.fixture(scope="module")
def merged(variants) -> dict[str, nn.Module]:
    return {name: copy.deepcopy(peft).merge_and_unload() for name, (peft, _) in variants.items()}


@pytest.fixture(scope="module")
def identities(merged) -> dict[str, ModelIdentity]:
    return {name: identify(model, None, name) for name, model in merged.items()}


def engine_of(executor) -> Engine:
    return Engine(executor, EngineConfig(scheduler="sarathi", token_budget=16, requests=8, watermark=0.0))


def prefilled(engine: Engine, request) -> None:
    while not request.output:
        engine.step()


@pytest.mark.parametrize("seed", range(12))
def test_what_an_engine_has_computed_is_what_a_prefill_computes(base, variants, merged, seed: int) -> None:
    """In steps that have requests of both and of the base, fused or not, in whatever chunks."""
    rng = random.Random(seed)
    executor, versions = shared(base, variants, hidden_cache=HiddenStateCache([EDGE]))
    if rng.random() < 0.7:
        list(executor.version.fuse())
    engine, models = engine_of(executor), merged | {"": base}
    asked = []
    for _ in range(6):
        name, prompt = rng.choice(sorted(models)), [rng.randrange(1, 260) for _ in range(rng.randint(3, 40))]
        asked.append((name, prompt, engine.submit(prompt, Sampling(8), version=versions[name])))
    for name, prompt, request in asked:
        prefilled(engine, request)
        if request.finished:
            continue
        mine, wanted = (
            served_prefix(executor, request, [EDGE]),
            full_prefill(models[name], Prefix.of([prompt]), [EDGE]),
        )
        for kv, own in zip(mine.kv, wanted.kv, strict=True):
            torch.testing.assert_close(kv.keys, own.keys, **CLOSE)
            torch.testing.assert_close(kv.values, own.values, **CLOSE)
        torch.testing.assert_close(mine.e_cache[EDGE], wanted.e_cache[EDGE], **CLOSE)
    engine.run()
    for name, prompt, request in asked:
        check_greedy(request.output, judged(models[name], prompt, greedy(models[name], prompt, 8)))
    executor.close()


@pytest.mark.parametrize("group", [Group(0, 0), Group(1, 3), Group(0, 2), Group(0, 3)], ids=str)
def test_a_variant_takes_what_another_has_just_computed(base, variants, merged, identities, group: Group) -> None:
    """The token is that of DroidSpeak's partial prefill over whole models; with all layers again it is its own."""
    executor, versions = shared(base, variants, hidden_cache=HiddenStateCache([EDGE]))
    list(executor.version.fuse())
    engine, store = engine_of(executor), KVStore(None, memory_bytes=1 << 24, block_tokens=4)
    context = [(11 * place) % 250 + 1 for place in range(32)]
    first = engine.submit([*context, 7], Sampling(4), version=versions["writer"])
    prefilled(engine, first)
    store.store(first.tokens[: first.prompt_tokens], identities["writer"], served_prefix(executor, first, [EDGE]))
    known = {"sender": identities["writer"], "receiver": identities["reader"], "group": group}
    prompt = [*context, 7, 9, 13]
    second = engine.submit(prompt, Sampling(4), version=versions["reader"], source=StoredPrefix(store, prompt, **known))
    engine.run()
    executor.close()
    taken = context  # of whole blocks
    sent = full_prefill(merged["writer"], Prefix.of([taken]), [EDGE])
    cache = partial_prefill(merged["reader"], Prefix.of([taken]), sent, group)
    suffix = torch.tensor([prompt[len(taken) :]])
    logits = suffix_logits(merged["reader"], Prefix.of([taken]), suffix, cache)
    assert not second.fell_back
    assert second.output[0] == int(logits[0, -1].argmax())
    if len(group) == SHAPE.num_hidden_layers:
        assert second.output == greedy(merged["reader"], prompt, 4)


def test_what_was_not_computed_or_not_kept_is_refused(base, variants) -> None:
    executor, versions = shared(base, variants)
    engine = engine_of(executor)
    request = engine.submit(list(range(1, 40)), Sampling(4), version=versions["writer"])
    engine.step()
    with pytest.raises(RequestError, match="has 16 of 39 tokens in the pool; ask when its prompt has been"):
        served_prefix(executor, request)
    prefilled(engine, request)
    with pytest.raises(RequestError, match=r"no hidden states of request 0 are kept at layer 1 \(layers: none\)"):
        served_prefix(executor, request, [EDGE])
    assert len(served_prefix(executor, request).kv) == SHAPE.num_hidden_layers
    engine.run()
    with pytest.raises(RequestError, match="has 0 of 39 tokens in the pool"):
        served_prefix(executor, request)
    executor.close()
