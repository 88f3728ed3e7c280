"""A replica over real HTTP, one service for the module: answers, whole and streamed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from plain_tokens import generated
from transformers import AutoModelForCausalLM

pytest.importorskip("starlette")

from services import CHATS, COMPLETIONS, GREEDY, byte_level, events, serving

import firsttoken
from firsttoken_serve.chat.text import Vocabulary, read_vocabulary
from firsttoken_serve.served_model import is_staged

MESSAGES = [{"role": "system", "content": "inn"}, {"role": "user", "content": "the hen"}]


@pytest.fixture(scope="module")
def vocabulary(tiny: Path) -> Vocabulary:
    return read_vocabulary(tiny, 64)


def answer(client: httpx.Client, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json=GREEDY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def texts(body: dict[str, Any]) -> list[str]:
    return [one["text"] if "text" in one else one["message"]["content"] for one in body["choices"]]


def streamed(client: httpx.Client, path: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
    return events(client.post(path, json=GREEDY | {"stream": True} | fields))


def joined(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice, from the parts that came."""
    found: dict[int, str] = {}
    for one in (choice for chunk in chunks for choice in chunk["choices"]):
        found[one["index"]] = found.get(one["index"], "") + (one.get("text") or one.get("delta", {}).get("content", ""))
    return found


def expected_ids(folder: Path, prompt_ids: list[int], count: int) -> list[int]:
    """What stock transformers generates from the folder."""
    return generated(AutoModelForCausalLM.from_pretrained(folder).eval(), prompt_ids, count).exact()


class TestCompletion:
    def test_is_what_transformers_generates(self, client, tiny, vocabulary):
        prompt_ids = vocabulary.prompt_ids("the inn")
        body = answer(client, prompt="the inn", max_tokens=24)
        (choice,) = body["choices"]
        assert choice["text"] == vocabulary.tokenizer.decode(expected_ids(tiny, prompt_ids, 24))
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None and body["stage"] == 3
        assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}
        assert body["object"] == "text_completion" and body["model"] == "tiny" and body["id"].startswith("cmpl-")
        assert answer(client, prompt=prompt_ids, max_tokens=24)["choices"] == body["choices"]

    def test_streamed_is_the_same_text(self, client):
        fields = {"prompt": "the inn", "max_tokens": 24, "model": "tiny"}
        response = client.post(COMPLETIONS, json=GREEDY | fields | {"stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-replica"] == "replica-0"
        chunks = events(response)
        assert len(chunks) == 25 and {chunk["stage"] for chunk in chunks} == {3}
        assert [joined(chunks)[0]] == texts(answer(client, **fields))
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * 24 + ["length"]
        assert len({chunk["id"] for chunk in chunks}) == 1 and not any("usage" in chunk for chunk in chunks)

    def test_usage_comes_last_when_it_is_asked_for(self, client):
        *chunks, last = streamed(client, prompt="the", max_tokens=3, stream_options={"include_usage": True})
        assert len(chunks) == 4 and all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}

    def test_ends_before_a_stop_text_across_tokens(self, client):
        (text,) = texts(answer(client, prompt="the inn", max_tokens=40))
        stop = text[20:23]  # of several tokens
        fields = {"prompt": "the inn", "max_tokens": 40, "stop": ["never there", stop]}
        body = answer(client, **fields)
        assert texts(body) == [text[: text.index(stop)]]
        assert body["choices"][0]["finish_reason"] == "stop" and body["usage"]["completion_tokens"] < 40
        chunks = streamed(client, **fields)
        assert [joined(chunks)[0]] == texts(body) and chunks[-1]["choices"][0]["finish_reason"] == "stop"

    def test_several_prompts_and_several_answers_each(self, client):
        prompts = ["the inn", "nine", "a hen"]
        body = answer(client, prompt=prompts, n=2, max_tokens=6)
        alone = [texts(answer(client, prompt=prompt, max_tokens=6))[0] for prompt in prompts]
        assert texts(body) == [text for text in alone for _ in range(2)]
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert body["usage"]["completion_tokens"] == 36 and body["usage"]["prompt_tokens"] == 4 + 4 + 4
        chunks = streamed(client, prompt=prompts, n=2, max_tokens=6)
        assert joined(chunks) == dict(enumerate(texts(body)))

    def test_echo_says_the_prompt_first(self, client):
        (text,) = texts(answer(client, prompt="the inn", max_tokens=5))
        assert texts(answer(client, prompt="the inn", max_tokens=5, echo=True)) == ["the inn" + text]
        assert joined(streamed(client, prompt="the inn", max_tokens=5, echo=True)) == {0: "the inn" + text}


class TestSampling:
    def test_a_seed_repeats_a_draw_in_any_company(self, client):
        fields = {"prompt": "the inn", "max_tokens": 16, "seed": 7, "temperature": 1.5, "top_p": 0.9}
        (alone,) = texts(answer(client, **fields))
        assert joined(streamed(client, **fields))[0] == alone
        together = texts(answer(client, **(fields | {"n": 8})))
        assert together[0] == alone and len(set(together)) == 8
        assert texts(answer(client, **(fields | {"seed": 8})))[0] == together[1]

    def test_without_a_seed_each_answer_is_another(self, client):
        fields = {"prompt": "the inn", "max_tokens": 16, "temperature": 1.5}
        assert len({texts(answer(client, **fields))[0] for _ in range(4)}) == 4

    def test_temperature_is_1_as_with_openai(self, client):
        fields = {"prompt": "the inn", "max_tokens": 16, "seed": 3}
        default = client.post(COMPLETIONS, json=fields).json()
        assert texts(default) == texts(answer(client, **fields, temperature=1)) != texts(answer(client, **fields))

    @pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
    def test_the_extreme_seeds_have_neighbours_too(self, client, seed):
        body = answer(client, prompt="the", max_tokens=2, n=2, seed=seed, temperature=1)
        assert len(body["choices"]) == 2


class TestLogprobs:
    def test_are_those_of_the_model(self, client, tiny, vocabulary):
        import torch

        body = answer(client, prompt="the inn", max_tokens=5, logprobs=3, echo=True)
        logs = body["choices"][0]["logprobs"]
        ids = vocabulary.prompt_ids("the inn")
        ids += expected_ids(tiny, ids, 5)
        with torch.inference_mode():
            model = AutoModelForCausalLM.from_pretrained(tiny).eval()
            shares = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert logs["tokens"] == [vocabulary.spelling.name(i) for i in ids]
        wanted = [float(shares[place, token]) for place, token in enumerate(ids[1:])]
        assert logs["token_logprobs"][0] is None and logs["top_logprobs"][0] is None
        assert logs["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)  # batched and alone, in fp32
        tops = [max(top.values()) for top in logs["top_logprobs"][1:]]
        assert tops == pytest.approx(shares[:-1].max(-1).values.tolist(), abs=1e-4)
        assert [max(top, key=top.get) for top in logs["top_logprobs"][4:]] == logs["tokens"][4:]
        spelt = [vocabulary.spelling.spelt(i) for i in ids]
        whole = [b"".join(spelt[:i]).decode(errors="ignore") for i in range(len(ids))]
        assert all(len(text) <= offset for text, offset in zip(whole, logs["text_offset"], strict=True))

    def test_come_with_their_chunks(self, client):
        fields = {"prompt": "the inn", "max_tokens": 5, "logprobs": 2}
        whole = answer(client, **fields)["choices"][0]["logprobs"]
        parts = [chunk["choices"][0]["logprobs"] for chunk in streamed(client, **fields)]
        assert [token for part in parts if part for token in part["tokens"]] == whole["tokens"]

    def test_none_of_the_likeliest(self, client):
        logs = answer(client, prompt="the", max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
        assert [list(top.values()) for top in logs["top_logprobs"]] == [[one] for one in logs["token_logprobs"]]


class TestChat:
    def test_is_the_completion_of_what_the_template_makes(self, client, tiny):
        from transformers import AutoTokenizer

        prompt = AutoTokenizer.from_pretrained(tiny).apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=True
        )
        body = answer(client, CHATS, messages=MESSAGES, max_tokens=9)
        assert texts(body) == texts(answer(client, prompt=prompt, max_tokens=9))
        assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
        assert body["choices"][0]["message"]["role"] == "assistant"
        assert texts(answer(client, CHATS, messages=MESSAGES, max_completion_tokens=9)) == texts(body)
        parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "hen"}]
        in_parts = [MESSAGES[0], {"role": "user", "content": parts}]
        assert texts(answer(client, CHATS, messages=in_parts, max_tokens=9)) == texts(body)

    def test_streamed_is_the_same(self, client):
        chunks = streamed(client, CHATS, messages=MESSAGES, max_tokens=9, n=2)
        assert list(joined(chunks).values()) == texts(answer(client, CHATS, messages=MESSAGES, max_tokens=9, n=2))
        openings = [chunk["choices"][0] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
        assert [one["index"] for one in openings] == [0, 1]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}

    def test_likelihoods(self, client):
        fields = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
        logs = answer(client, CHATS, **fields)["choices"][0]["logprobs"]["content"]
        assert len(logs) == 3 and all(len(one["top_logprobs"]) == 2 for one in logs)
        assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in logs), "greedy says the likeliest"
        assert all(bytes(one["bytes"]).decode() == one["token"] for one in logs)


def test_models_names_the_one_model(client):
    body = client.get("/v1/models").json()
    assert body["object"] == "list" and [model["id"] for model in body["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json() == body["data"][0]
    assert client.get("/v1/models/other").status_code == 404


def test_routes_of_vllm_and_what_is_said_of_others(client):
    assert client.get("/version").json() == {"version": firsttoken.__version__}
    assert client.post("/ping").status_code == client.get("/ping").status_code == 200
    ids = client.post("/tokenize", json={"prompt": "the inn"}).json()
    longest = client.get("/v1/models/tiny").json()["max_model_len"]
    assert ids == {"count": 4, "max_model_len": longest, "tokens": byte_level().encode("the inn").ids}
    assert client.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": "the inn"}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "the"}]}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": chat}).json() == {"prompt": "user the<end>in "}
    assert client.post("/detokenize", json={"tokens": [260]}).json()["error"]["param"] == "tokens"
    for path in ("/v1/responses", "/v1/embeddings"):
        missing = client.post(path, json={"input": "a"})
        assert missing.status_code == 404 and "/v1/chat/completions, " in missing.json()["error"]["message"]
    assert client.get("/v1/completions").status_code == 405


def test_metrics_count_what_happened(client):
    from prometheus_client.parser import text_string_to_metric_families

    def counted() -> dict[str, float]:
        page = client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = {}
        for family in text_string_to_metric_families(page.text):
            for sample in family.samples:
                assert family.documentation and sample.labels.get("model", "tiny") == "tiny"
                found[sample.name + sample.labels.get("outcome", "") + sample.labels.get("le", "")] = sample.value
        return found

    before = counted()
    answer(client, prompt="the inn", max_tokens=9)
    streamed(client, prompt="the inn", max_tokens=5)
    client.post(COMPLETIONS, content=b"{")
    after = counted()
    gained = {name: after[name] - before[name] for name in after}
    assert gained["firsttoken_requests_totalanswered"] == 2 and gained["firsttoken_requests_totalrefused"] == 1
    assert gained["firsttoken_generated_tokens_total"] == 14 and gained["firsttoken_prompt_tokens_total"] == 8
    assert gained["firsttoken_time_to_first_token_seconds_count"] == 2
    assert gained["firsttoken_time_between_tokens_seconds_count"] == 12
    queue, whole = (f"firsttoken_{name}_time_seconds" for name in ("queue", "request"))
    assert gained[f"{queue}_count"] == gained[f"{whole}_count"] == 2
    assert 0 < gained[f"{queue}_sum"] < gained["firsttoken_time_to_first_token_seconds_sum"] < gained[f"{whole}_sum"]
    assert after["firsttoken_stage"] == 3 and after["firsttoken_kv_blocks"] > 0


def test_the_page_asks_nobody_else_for_anything(client):
    response = client.get("/")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\(", response.text)
    assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval", response.text)
    below = re.findall(r'fetch\(here \+ "([^"]+)"', response.text)  # also where a proxy has put the page below a path
    assert set(below) == {"stage", "v1/"} and response.text.count("fetch(") == len(below)
    assert 'const here = location.pathname.replace(/\\/*$/, "/")' in response.text


class TestPlainFolder:
    def test_another_manifest_beside_the_weights_makes_no_staged_folder(self, plain, tiny, tmp_path):
        folder = shutil.copytree(plain, tmp_path / "plain")
        (folder / "manifest.json").write_text('{"gguf_sha256": "", "files": {}}')
        assert is_staged(tiny) and not is_staged(plain) and not is_staged(folder)

    def test_is_served_whole_and_ends_at_its_own_end(self, plain):
        with serving(plain) as url:
            vocabulary = read_vocabulary(plain, 64)
            ids = expected_ids(plain, vocabulary.prompt_ids("the inn"), 64)
            end = next((place for place, token in enumerate(ids) if token in vocabulary.stop_ids), len(ids))
            body = httpx.post(f"{url}{COMPLETIONS}", json=GREEDY | {"prompt": "the inn", "max_tokens": 64}).json()
            status = httpx.get(f"{url}/stage").json()
        assert body["choices"][0]["text"] == vocabulary.tokenizer.decode(ids[:end])
        assert body["choices"][0]["finish_reason"] == ("stop" if end < 64 else "length")
        assert body["usage"]["completion_tokens"] == min(64, end + 1)
        assert (status["stage"], status["stages"], status["state"]) == (1, 1, "complete")
        assert status["bytes_loaded"] == status["bytes_total"] > 0
