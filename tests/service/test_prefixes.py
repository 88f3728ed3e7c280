"""Keys and values that were computed before the service began, in a folder that it is told of."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from services import TIMEOUT_S, serving, until, workers
from transformers import AutoModelForCausalLM, AutoTokenizer

from firsttoken.assets.checkpoint import combined_sha256, weight_files
from firsttoken.droidspeak.identity import ModelIdentity, identify
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.prefix import LayerKV, Prefix, PrefixCache
from firsttoken.droidspeak.store import KVStore

CONTEXT = list(range(10, 74))
PROMPT = [*CONTEXT, 5, 6, 7]

Change = Callable[[PrefixCache, ModelIdentity], tuple[PrefixCache, ModelIdentity]]


def as_it_is(cache: PrefixCache, identity: ModelIdentity) -> tuple[PrefixCache, ModelIdentity]:
    return cache, identity


def empty(cache: PrefixCache, identity: ModelIdentity) -> tuple[PrefixCache, ModelIdentity]:
    kv = tuple(LayerKV(kv.keys * 0, kv.values * 0) for kv in cache.kv)
    return PrefixCache(kv, cache.e_cache), identity


def of_another(cache: PrefixCache, identity: ModelIdentity) -> tuple[PrefixCache, ModelIdentity]:
    return empty(cache, replace(identity, weights="5e12" * 16))


def keep(model: Path, folder: Path, change: Change) -> None:
    """Store what the stock model computes for CONTEXT."""
    stock = AutoModelForCausalLM.from_pretrained(model).eval()
    identity = identify(stock, AutoTokenizer.from_pretrained(model), combined_sha256(weight_files(model)))
    cache, identity = change(full_prefill(stock, Prefix.of([CONTEXT]), set()), identity)
    KVStore(folder, memory_bytes=0, disk_bytes=1 << 30).store(CONTEXT, identity, cache)


def answered(model: Path, store: Path | None, **settings: Any) -> tuple[str, int]:
    """What is said to PROMPT, and how many requests began with a stored prefix."""
    with serving(model, prefix_store=store, **settings) as url:
        if store is not None:
            until(lambda: "stored prefixes" in httpx.get(f"{url}/stage").text, "the store is open")
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).json()["choices"][0]
        return answer["logprobs"]["tokens"], httpx.get(f"{url}/stage").json()["restored"]


@pytest.fixture(scope="module")
def alone(plain) -> str:
    """The answer of a service without a store."""
    text, restored = answered(plain, None)
    assert restored == 0
    return text


@pytest.mark.parametrize("worker", [False, True], ids=["here", "in a worker"])
def test_a_stored_prefix_is_not_computed_again(plain, tmp_path, alone, worker: bool) -> None:
    keep(plain, tmp_path / "right", as_it_is)
    assert answered(plain, tmp_path / "right", worker=worker) == (alone, 1)
    keep(plain, tmp_path / "wrong", empty)
    text, restored = answered(plain, tmp_path / "wrong", worker=worker)
    assert restored == 1 and text != alone, "else what is stored was not used"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="finds the worker by /proc")
def test_a_worker_that_is_lost_is_given_it_again(plain, tmp_path, alone) -> None:
    keep(plain, tmp_path / "right", as_it_is)
    with serving(plain, prefix_store=tmp_path / "right", worker=True) as url:
        until(lambda: "stored prefixes" in httpx.get(f"{url}/stage").text, "the store is open")
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0}
        for asked in range(1, 4):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).json()["choices"][0]
            status = httpx.get(f"{url}/stage").json()
            assert answer["logprobs"]["tokens"] == alone
            assert (status["restored"], status["workers_lost"]) == (asked, asked - 1)
            (worker,) = workers()
            os.kill(worker, signal.SIGKILL)
    until(lambda: not workers(), "no worker is left")


def test_what_does_not_fit_is_computed(plain, tmp_path, alone) -> None:
    """Another model's prefix, and a file that is torn."""
    keep(plain, tmp_path / "other", of_another)
    assert answered(plain, tmp_path / "other") == (alone, 0)
    keep(plain, tmp_path / "torn", as_it_is)
    (file,) = (path for path in (tmp_path / "torn").iterdir() if path.is_file())
    content = bytearray(file.read_bytes())
    content[-100:] = bytes(100)  # of the last layer: only its sha256 can tell
    file.write_bytes(content)
    text, _ = answered(plain, tmp_path / "torn")
    assert text == alone
