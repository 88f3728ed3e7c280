"""A tiny model, staged and as a plain folder, with both kinds of tokenizer; and services of it on real sockets."""

from __future__ import annotations

import inspect
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import byte_tokenizers
import httpx
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from waiting import TIMEOUT_S, until

from firsttoken.assets.checkpoint import combined_sha256, weight_files
from firsttoken.assets.shapes import shape_config
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.loading.read_plan import part_blobs
from firsttoken.progressiveserve.stages import StagePlan

MERGES = [("t", "h"), ("th", "e"), ("i", "n")]
TURN = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}<end>{% endfor %}"
CHAT = TURN + "{% if add_generation_prompt %}in {% endif %}"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LIMITS = {"max_running": 12, "max_waiting": 0, "max_prompt_tokens": 64, "max_new_tokens": 9000, "max_choices": 8}
GREEDY = {"temperature": 0}
ENDLESS = "the inn"  # what is said to it does not end within a minute
# of whoever gives no timeout; httpx's own five seconds pass where two processes of tests have both cores
PATIENCE = inspect.signature(httpx.get).parameters["timeout"].default
PATIENCE.connect = PATIENCE.read = PATIENCE.write = PATIENCE.pool = TIMEOUT_S


def byte_level() -> Tokenizer:
    """Of bytes, and three merges."""
    tokenizer = byte_tokenizers.byte_level(merges=MERGES)
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Of some letters, and the same merges."""
    tokenizer = byte_tokenizers.byte_fallback("abcdefghinot", merges=MERGES)
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def tiny_model() -> Any:
    """Six layers that never end an answer by themselves."""
    config = shape_config("tiny-6")
    config.update({"vocab_size": 260, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None})
    config.max_position_embeddings = 32768  # room for an answer that a client does not wait for
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes, with a chat template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT
    return tokenizer


def write_tiny(folder: Path) -> None:
    """A staged checkpoint: layers 1 and 2 wait for stage 2, 3 and 4 for stage 3. 109, 76 and 76 kB."""
    source = ModelSource(tiny_model(), tiny_tokenizer(), Origin("tiny", "5e12" * 16, "real"))
    write_staged(source, staged(source.names, StagePlan.from_block(6, range(1, 5))), folder)


def write_endless(folder: Path) -> None:
    """The same model as transformers saves it."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def write_plain(folder: Path) -> None:
    """The same model as transformers saves it; the token of "t" ends its answers."""
    model = tiny_model()
    model.generation_config.eos_token_id = byte_level().token_to_id("t")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def free_port() -> int:
    """A port on loopback that nobody listens on, below those that the system gives to connections by itself.

    Between this answer and its use another process of the tests may connect to somewhere, from a port of its own: were
    this one of those, it would now and then be taken (once in CI, by one of Ray's processes).
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[str]:
    """The URL of a service whose stages have all arrived."""
    from firsttoken_serve.http.launch import running
    from firsttoken_serve.service_config import ServiceConfig

    with running(ServiceConfig(folder, port=free_port(), **settings)) as url:
        until(lambda: httpx.get(f"{url}/stage").json()["state"] == "complete", "all stages serve")
        yield url


@contextmanager
def stage_1_alone(folder: Path, **settings: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a service of a staged checkpoint whose first stage answers, and a function that lets the others come;
    those that have not come by the end of the block fail."""
    from firsttoken_serve.http.launch import running
    from firsttoken_serve.service_config import ServiceConfig

    first = sum(blob.bytes for blob in part_blobs(folder, read_manifest(folder), [1]))
    gate, read, dead = threading.Event(), Link.read_into, threading.Event()

    def read_into(link: Link, *what: Any) -> None:
        if link.bytes_moved >= first:
            gate.wait(TIMEOUT_S)
            if dead.is_set():
                raise OSError("the disk is gone")
        read(link, *what)

    config = ServiceConfig(folder, port=free_port(), **settings)
    with patch.object(Link, "read_into", read_into), running(config) as url:
        try:
            until(lambda: httpx.get(f"{url}/stage").json()["stage"] == 1, "stage 1 serves")
            yield url, gate.set
        finally:
            dead.set()
            gate.set()


@contextmanager
def with_prefixes(folder: Path, store: Path, **settings: Any) -> Iterator[str]:
    """The same, once its store of prefixes is open."""
    with serving(folder, prefix_store=store, **settings) as url:
        until(lambda: "stored prefixes are used" in httpx.get(f"{url}/stage").text, "the store is open")
        yield url


def said(url: str, prompt: str | list[int], model: str | None = None, max_tokens: int = 12) -> str:
    """The greedy answer of ``model``, or of whichever the service has, which no token ends."""
    asked = GREEDY | {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    answer = httpx.post(f"{url}{COMPLETIONS}", json=asked | ({"model": model} if model else {}), timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def restored(url: str) -> int:
    """How many requests of a service began with a stored prefix."""
    return httpx.get(f"{url}/stage").json()["restored"]


def write_staged_endless(folder: Path, whole: Path) -> None:
    """The model of ``write_endless`` in stages, of the folder ``whole`` by its hash."""
    origin = Origin(whole.name, combined_sha256(weight_files(whole)), "real")
    source = ModelSource(tiny_model(), tiny_tokenizer(), origin)
    write_staged(source, staged(source.names, StagePlan.from_block(6, range(1, 5))), folder)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended as it should."""
    assert response.status_code == 200, response.text
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
