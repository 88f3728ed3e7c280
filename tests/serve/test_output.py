"""Over HTTP: an output that is no number is a fault of the server, and what an answer says does not hang on others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from edited import set_keys
from rotary import ROTARY, TRAINED
from services import TIMEOUT_S, serving, tiny_model, tiny_tokenizer

pytest.importorskip("starlette")

BAD = 90  # a token of which the damaged model has no numbers
BODIES = {
    "greedy": {"max_tokens": 4, "temperature": 0},
    "drawn": {"max_tokens": 4, "temperature": 1.0, "seed": 3},
    "logprobs": {"max_tokens": 4, "temperature": 0, "logprobs": 2},
    "prompt logprobs": {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True},
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service of a model with a damaged row of its embedding."""
    folder, model = tmp_path_factory.mktemp("damaged"), tiny_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # of its own: only who reads BAD is ill
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with serving(folder) as url:
        yield url


def asked(url: str, prompt: list[int], **body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": prompt, **body}, timeout=TIMEOUT_S)


def failed(url: str) -> float:
    """The requests that the service counts as failed."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if "_total{" in line and '"failed"' in line)


@pytest.mark.parametrize("mode", BODIES)
def test_no_number_is_a_fault_of_the_server(damaged: str, mode: str) -> None:
    before = failed(damaged)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(asked, damaged, [5, 6, 7], max_tokens=30, temperature=0)
        said = asked(damaged, [1, 2, BAD, 3], **BODIES[mode])
        fine = beside.result(TIMEOUT_S)
    assert said.status_code == 500 and "no finite number; copy its weights again" in said.json()["error"]["message"]
    assert said.json()["error"]["type"] == "server_error"
    alone = asked(damaged, [5, 6, 7], max_tokens=30, temperature=0)
    assert fine.status_code == alone.status_code == 200, (fine.text, alone.text)
    assert fine.json()["choices"] == alone.json()["choices"]
    assert failed(damaged) == before + 1


def test_a_stream_says_it_too(damaged: str) -> None:
    said = asked(damaged, [1, 2, BAD, 3], stream=True, **BODIES["greedy"])
    text = said.text
    assert said.status_code >= 500 or '"error"' in text, text
    assert "no finite number" in text and '"finish_reason": "stop"' not in text
    assert "NaN" not in text and "Infinity" not in text


def test_a_short_answer_beside_long_ones_that_longrope_refuses(tmp_path: Path) -> None:
    """The context that is announced is the one up to which no neighbour turns a request's keys."""
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    longrope = dict(ROTARY["longrope"]["rope_parameters"])
    for name in ("short_factor", "long_factor"):
        longrope[name] = (longrope[name] * width)[: width // 2]
    set_keys(tmp_path / "config.json", rope_parameters=longrope)
    body = {"max_tokens": 12, "temperature": 0}
    with serving(tmp_path) as url:
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == TRAINED
        alone = asked(url, list(range(100, 108)), **body).json()["choices"]
        with ThreadPoolExecutor(3) as pool:
            long = [pool.submit(asked, url, [200 + i] * 100, max_tokens=150, temperature=0) for i in range(2)]
            full = pool.submit(asked, url, [9] * (TRAINED - 20), max_tokens=20, temperature=0)
            beside = [asked(url, list(range(100, 108)), **body).json()["choices"] for _ in range(4)]
        assert beside == [alone] * 4 and full.result().status_code == 200
        assert {one.result().status_code for one in long} == {400}
