"""Answers of `firsttoken serve` before torch is there, and of the engine that goes on with them.

The import of torch waits at a gate, so that what comes before it is known to come from numpy.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("uvicorn")

from gated import KEY, Gated, gated
from plain_tokens import check_greedy, judged
from services import CHATS, COMPLETIONS, GREEDY, TIMEOUT_S, free_port, serving, tiny_tokenizer, until
from small_models import small_model
from transformers import AutoModelForCausalLM

from firsttoken.assets.servable import check_servable
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study import dtypes
from firsttoken_cpu.before_torch.numpy_answers import NumpyAnswers
from firsttoken_cpu.before_torch.numpy_model import NumpyModel
from firsttoken_cpu.before_torch.numpy_weights import FolderWeights
from firsttoken_cpu.fused import PackedLinear
from firsttoken_cpu.native.library import kernels
from firsttoken_serve.served_model import PlainServer

pytestmark = pytest.mark.long(seconds=60)
LONG, PACE_S = 1000, 0.03  # tokens, of which numpy says 100 in three seconds
DRAWN = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
STREAM = {"prompt": "the inn", "max_tokens": LONG, "stream": True} | GREEDY
SHORT = [{"prompt": prompt, "max_tokens": 12} | GREEDY for prompt in ("the inn", "in the hat", "a")]
CHAT = {"messages": [{"role": "user", "content": "the inn"}], "max_tokens": 12} | GREEDY


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if kernels() is None:
        pytest.skip("there is no C++ compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, with heads as wide as the kernels know them, which never ends an answer by itself."""
    folder = tmp_path_factory.mktemp("before") / "model"
    sizes = {"vocab_size": 260, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None}
    small_model("Llama", **sizes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in three stages of a layer each."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    source = ModelSource(model, tiny_tokenizer(), Origin("tiny", "5e12" * 16, "real"))
    place = tmp_path_factory.mktemp("before") / "stages"
    write_staged(source, staged(source.names, StagePlan.from_block(3, range(1, 3))), place)
    return place


@pytest.fixture(scope="module")
def ordinary(folder: Path) -> Iterator[httpx.Client]:
    """A service of the same folder whose engine loads and computes everything: torch is in this process."""
    with serving(folder) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        yield client


@contextmanager
def asked(service: Gated) -> Iterator[httpx.Client]:
    told = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=service.url, headers=told, timeout=TIMEOUT_S) as client:
        yield client


def choices(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def pieces(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The choice of each event, as it comes; of an error, that."""
    for line in filter(None, answer.iter_lines()):
        if line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        yield event["choices"][0] | {"stage": event["stage"]} if "choices" in event else event
    raise AssertionError("the stream has no end")


def complete(client: httpx.Client) -> bool:
    return client.get("/stage").json()["state"] == "complete"


@pytest.mark.parametrize("chosen", [GREEDY, DRAWN])
def test_the_engine_goes_on_in_the_middle_of_a_stream(folder, ordinary, tmp_path, chosen) -> None:
    """With the same tokens, and without a trace of numpy's model."""
    body = STREAM | chosen
    with gated(folder, tmp_path / "held", pace_s=PACE_S) as service, asked(service) as client:
        modules = json.loads((service.place / "modules.json").read_text())
        assert not [name for name in modules if name.split(".")[0] in ("torch", "transformers", "peft")]
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            came = pieces(answer)
            said = [next(came) for _ in range(5)]
            assert client.get("/health").status_code == 503
            service.open()
            said += came
        assert {piece["stage"] for piece in said} == {1}
        wanted = choices(ordinary.post(COMPLETIONS, json=body | {"stream": False}))[0]
        assert "".join(piece["text"] for piece in said) == wanted["text"]
        assert said[-1]["finish_reason"] == wanted["finish_reason"] == "length"
        assert complete(client) and choices(client.post(COMPLETIONS, json=SHORT[0]))
        assert str(folder) not in Path(f"/proc/{service.process.pid}/maps").read_text()
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(TIMEOUT_S) == 0
        assert service.strays == "" and (service.place / "errors").read_text() == ""


def test_a_first_stage_answers_before_torch(stages, ordinary, tmp_path) -> None:
    """Who stays with it gets its tokens to the end, and the next ones are the whole model's."""
    with gated(stages, tmp_path / "held", pace_s=PACE_S) as service, asked(service) as client:
        modules = json.loads((service.place / "modules.json").read_text())
        assert not [name for name in modules if name.split(".")[0] in ("torch", "transformers", "peft")]
        with client.stream("POST", COMPLETIONS, json=STREAM) as answer:
            came = pieces(answer)
            said = [next(came) for _ in range(5)]
            assert client.get("/stage").json()["state"] == "starting"
            service.open()
            said += came
        assert {piece["stage"] for piece in said} == {1} and said[-1]["finish_reason"] == "length"
        until(lambda: complete(client), "all stages serve")
        whole = [choices(one.post(COMPLETIONS, json=SHORT[0]))[0]["text"] for one in (client, ordinary)]
        assert whole[0] == whole[1] and not "".join(piece["text"] for piece in said).startswith(whole[0])
        assert service.strays == "" and (service.place / "errors").read_text() == ""


def test_several_requests_before_torch(folder, ordinary, tmp_path) -> None:
    """They are answered one after the other, chats and several answers to one request too, up to a stop, and drawn."""
    text = choices(ordinary.post(COMPLETIONS, json=SHORT[0]))[0]["text"]
    bodies = [*SHORT, SHORT[0] | {"n": 2}, SHORT[0] | {"stop": text[5:7]}, SHORT[1] | {"echo": True}]
    bodies += [SHORT[1] | DRAWN | {"n": 2}, SHORT[2] | {"temperature": 1, "seed": -3}]
    wanted = [choices(ordinary.post(COMPLETIONS, json=body)) for body in bodies]
    assert wanted[4][0]["finish_reason"] == "stop" and wanted[4][0]["text"] == text[: text.index(text[5:7])]
    chat = choices(ordinary.post(CHATS, json=CHAT))
    with gated(folder, tmp_path / "held") as service, asked(service) as client, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: client.post(COMPLETIONS, json=body), bodies))
        assert [choices(one) for one in answers] == wanted
        assert choices(client.post(CHATS, json=CHAT)) == chat
        assert client.get("/stage").json()["sessions"] == 0 and not complete(client)
        assert service.strays == ""


def test_what_numpy_does_not_say_waits_for_torch(folder, ordinary, tmp_path) -> None:
    bodies = [
        SHORT[0] | DRAWN | {"logprobs": 1},
        SHORT[0] | {"logprobs": 1},
        SHORT[0] | {"max_tokens": 0, "echo": True, "logprobs": 0},
    ]
    with gated(folder, tmp_path / "held") as service, asked(service) as client, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(client.post, COMPLETIONS, json=body) for body in bodies]
        until(lambda: client.get("/stage").json()["sessions"] == len(bodies), "all wait")
        assert choices(client.post(COMPLETIONS, json=SHORT[0]))  # and hold nobody up who need not
        assert not any(one.done() for one in waiting)
        service.open()
        for body, one in zip(bodies, waiting, strict=True):
            said, wanted = choices(one.result())[0], choices(ordinary.post(COMPLETIONS, json=body))[0]
            assert said["text"] == wanted["text"] and bool(said["logprobs"]) is ("logprobs" in body)


def test_a_client_that_leaves_before_torch(folder, tmp_path) -> None:
    """The next one is answered, by numpy too."""
    with gated(folder, tmp_path / "held", pace_s=PACE_S) as service, asked(service) as client:
        with client.stream("POST", COMPLETIONS, json=STREAM) as answer:
            came = pieces(answer)  # which closes the answer when it is let go of
            next(came)
            assert client.get("/stage").json()["sessions"] == 1
        assert choices(client.post(COMPLETIONS, json=SHORT[1] | {"max_tokens": 3}))
        assert client.get("/stage").json()["sessions"] == 0
        assert 'outcome="cancelled"} 1.0' in client.get("/metrics").text
        service.open()
        until(lambda: complete(client), "the engine is there")
        assert choices(client.post(COMPLETIONS, json=SHORT[1]))


def test_a_torch_that_cannot_be_imported_ends_an_answer(folder, tmp_path) -> None:
    with gated(folder, tmp_path / "held", pace_s=PACE_S) as service, asked(service) as client:
        with client.stream("POST", COMPLETIONS, json=STREAM) as answer:
            came = pieces(answer)
            next(came)
            (service.place / "broken").touch()
            service.open()
            *_, last = came
        assert "cannot be imported: libtorch.so" in last["error"]["message"]
        assert service.process.wait(TIMEOUT_S) == 2
        assert (service.place / "errors").read_text().count("\n") == 1


def test_an_end_before_torch_lets_answers_end(folder, tmp_path) -> None:
    with gated(folder, tmp_path / "held", pace_s=PACE_S) as service, asked(service) as client:
        with client.stream("POST", COMPLETIONS, json=STREAM | {"max_tokens": 40}) as answer:
            came = pieces(answer)
            next(came)
            service.process.send_signal(signal.SIGINT)
            assert [piece["finish_reason"] for piece in came][-1] == "length"
        service.open()
        assert service.process.wait(TIMEOUT_S) == 0 and (service.place / "errors").read_text() == ""


@pytest.mark.parametrize("options", [("--torch-first",), ("--variant", "qa=adapter")])
def test_where_everybody_waits_for_torch(folder, tmp_path, options) -> None:
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(small_model("Llama", vocab_size=260), LoraConfig(r=2, target_modules=["q_proj"]))
    peft.save_pretrained(tmp_path / "adapter")
    options = [option.replace("adapter", str(tmp_path / "adapter")) for option in options]
    with gated(folder, tmp_path / "held", *options) as service, asked(service) as client, ThreadPoolExecutor(1) as pool:
        waiting: Future[httpx.Response] = pool.submit(client.post, COMPLETIONS, json=SHORT[0])
        until(lambda: client.get("/stage").json()["sessions"] == 1, "it waits")
        time.sleep(0.3)
        assert not waiting.done()
        service.open()
        assert choices(waiting.result())


@pytest.mark.parametrize("wrong", ["empty", "cut", "words"])
def test_a_folder_that_is_no_model(folder, tmp_path, wrong) -> None:
    """It is refused in the line that there always was."""
    place = tmp_path / "model"
    place.mkdir()
    for file in folder.iterdir() if wrong != "empty" else ():
        (place / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
    if wrong == "words":
        (place / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        (place / "tokenizer.json").unlink()
    told = []
    for options in ([], ["--torch-first"]):
        command = [sys.executable, "-m", "firsttoken", "serve", str(place), "--port", str(free_port()), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("firsttoken: ")
        told.append(done.stderr)
    assert told[0] == told[1]


def test_who_began_with_the_kernels_ends_with_them(accelerated, folder, tmp_path, monkeypatch) -> None:
    """Where oneDNN multiplies, as with AMX: with what numpy alone would have said, and later requests are oneDNN's."""
    accelerated("onednn")
    halves = shutil.copytree(folder, tmp_path / "halves")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(halves)
    model = NumpyModel(FolderWeights(check_servable(halves), 1), context=600, threads=1)
    if dtypes.serving(dtypes.AUTO, torch.bfloat16, "cpu") != torch.bfloat16 or model.dtype != "bfloat16":
        pytest.skip("this CPU does not compute in bf16")
    prompt = list(range(3, 60))  # longer than what the kernels attend to where SDPA has tiles
    wanted = [model.next_token(prompt)]
    while len(wanted) < 500:
        wanted.append(model.next_token(wanted[-1:]))
    right, comes = PlainServer._import, threading.Event()
    monkeypatch.setattr(PlainServer, "_import", lambda server: (comes.wait(TIMEOUT_S), right(server)))
    early: Future[NumpyModel] = Future()
    early.set_result(NumpyModel(FolderWeights(check_servable(halves), 1), context=600, threads=1))
    limits = RequestLimits(max_sessions=4, max_model_len=600)
    server = PlainServer(halves, limits, device="cpu", broken=lambda error: None, early=partial(NumpyAnswers, early))
    server.start()
    try:
        begun = iter(server.submit(prompt, 500))
        said = [next(begun) for _ in range(3)]
        comes.set()
        until(lambda: server.status()["state"] == "complete", "the engine is there")
        assert [*said, *begun] == wanted

        def products() -> set[type]:
            (segment,) = server._live.version.decoder.segments
            return {type(product) for layer in segment.modules for product in (layer.joint, layer.down)}

        until(lambda: products() == {PackedLinear}, "oneDNN multiplies for who comes")
        later = list(server.submit(prompt, 12))
        plain = AutoModelForCausalLM.from_pretrained(halves, dtype=torch.float32)
        check_greedy(later, judged(plain, prompt, later), 0.3)
    finally:
        comes.set()
        server.close()
