"""What a service announces is what it takes, over real HTTP; and what clients look for in its answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from edited import set_keys
from plain_tokens import generated
from transformers import AutoModelForCausalLM

pytest.importorskip("starlette")

from client_bodies import combined
from services import CHATS, COMPLETIONS, GREEDY, byte_level, events, serving

from firsttoken.engine.request_limits import POOL_TOKENS
from firsttoken.study.errors import RequestError
from firsttoken.study.parsing.schema import parse_as
from firsttoken_serve.chat.chat_template import ChatTemplate
from firsttoken_serve.chat.template_renderer import RENDERER
from firsttoken_serve.chat.text import Vocabulary
from firsttoken_serve.http.answer import Answers
from firsttoken_serve.http.request_schema import ChatRequest
from firsttoken_serve.service_config import ServiceConfig

ROOM = 64  # tokens of the four blocks of the service
SAID = 4  # tokens before the one that ends the answer to "the inn"
TURN = [{"role": "user", "content": "the hen"}]


@pytest.fixture(scope="module")
def small(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Of a service with little room, whose model soon says the token that ends its answers."""
    folder = shutil.copytree(plain, tmp_path_factory.mktemp("small") / "plain")
    prompt = byte_level().encode("the inn").ids
    said = generated(AutoModelForCausalLM.from_pretrained(plain).eval(), prompt, 3 * SAID).exact()
    end = next(token for token in said[SAID:] if token not in said[:SAID])
    set_keys(folder / "generation_config.json", eos_token_id=end)
    with serving(folder, kv_blocks=ROOM // 16) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


def ask(client: httpx.Client, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    return client.post(path, json=GREEDY | {"ignore_eos": True} | fields)


def refused_as_too_long(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    return error["message"]


class TestLength:
    def test_what_is_announced_is_taken_and_no_token_more(self, small):
        announced = small.get("/v1/models").json()["data"][0]["max_model_len"]
        assert announced == ROOM
        for prompt in (1, announced - 1):
            ids = [65] * prompt
            taken = ask(small, prompt=ids, max_tokens=announced - prompt)
            assert taken.status_code == 200, taken.text
            assert taken.json()["usage"]["total_tokens"] == announced
            told = refused_as_too_long(ask(small, prompt=ids, max_tokens=announced - prompt + 1))
            assert f"{announced} tokens" in told and str(prompt) in told and str(announced + 1) in told

    def test_nobody_is_refused_for_a_default_that_was_not_asked_for(self, small):
        for prompt, said in ((1, 16), (ROOM - 8, 8), (ROOM - 1, 1)):
            response = ask(small, prompt=[65] * prompt)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == said
        chat = ask(small, CHATS, messages=TURN).json()["usage"]
        assert chat["total_tokens"] == ROOM
        assert str(ROOM) in refused_as_too_long(ask(small, prompt=[65] * ROOM))
        assert "the limit is" in refused_as_too_long(ask(small, prompt=[65] * 40_000))

    def test_the_shortest_limit_is_announced(self, tmp_path):
        config = ServiceConfig(tmp_path)
        assert config.max_len(8192) == 8192 and config.max_len(131_072) == POOL_TOKENS
        assert ServiceConfig(tmp_path, max_model_len=32_768).max_len(131_072) == 32_768
        assert ServiceConfig(tmp_path, max_model_len=32_768, kv_blocks=64).max_len(131_072) == 1024
        assert ServiceConfig(tmp_path, max_prompt_tokens=64, max_new_tokens=36).max_len(8192) == 100
        assert ServiceConfig(tmp_path, max_new_tokens=36).max_len(131_072) == POOL_TOKENS + 36


class TestScoring:
    def test_a_prompt_is_judged_and_nothing_said(self, small):
        fields = {"prompt": "the inn", "echo": True, "logprobs": 2}
        scored = ask(small, **fields, max_tokens=0).json()
        (choice,) = scored["choices"]
        longer = ask(small, **fields, max_tokens=1).json()["choices"][0]
        assert choice["text"] == "the inn" and choice["finish_reason"] == "length"
        assert scored["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
        assert choice["logprobs"]["tokens"] == longer["logprobs"]["tokens"][:-1] == ["the", " ", "in", "n"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(longer["logprobs"]["token_logprobs"][:-1])
        assert choice["logprobs"]["text_offset"] == [0, 3, 4, 6]
        assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, 2, 2, 2]

    def test_streamed_and_without_likelihoods(self, small):
        chunks = events(ask(small, prompt=["the", "inn"], echo=True, max_tokens=0, stream=True))
        texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == n) for n in (0, 1)]
        assert texts == ["the", "inn"]
        error = ask(small, prompt="the", max_tokens=0).json()["error"]
        assert error["param"] == "max_tokens" and "set echo to true" in error["message"]


def test_no_token_ends_an_answer_that_ignores_them(small):
    ended = ask(small, prompt="the inn", max_tokens=40, ignore_eos=False).json()
    went_on = ask(small, prompt="the inn", max_tokens=40, min_tokens=40).json()
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] < 40
    assert went_on["choices"][0]["finish_reason"] == "length" and went_on["usage"]["completion_tokens"] == 40
    assert went_on["choices"][0]["text"].startswith(ended["choices"][0]["text"].rstrip("\ufffd"))
    chunks = events(
        ask(small, CHATS, messages=TURN, max_tokens=40, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1]["usage"]["completion_tokens"] == 40


def test_ends_and_biases_by_id(small):
    """65 is the id of "a"."""
    said = {"prompt": "the inn", "max_tokens": 9, "ignore_eos": True, "temperature": 0, "logit_bias": {"65": 100}}

    def answered(**more) -> tuple[str, str, int]:
        body = ask(small, **said | more).json()
        (choice,) = body["choices"]
        return choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]

    assert answered() == ("aaaaaaaaa", "length", 9)
    assert answered(stop_token_ids=[65]) == ("", "stop", 1)
    assert answered(stop="aa") == ("", "stop", 2) and answered(stop="aa", min_tokens=3) == ("aaa", "stop", 5)
    text, reason, tokens = answered(stop_token_ids=[65], min_tokens=4)
    assert "a" not in text and (reason, tokens) == ("stop", 5)
    assert answered(min_tokens=9, stop="aa") == ("aaaaaaaaa", "length", 9)
    assert len(set(answered(logit_bias={}, frequency_penalty=2, repetition_penalty=100)[0])) > 4
    for field, value in (("logit_bias", {"260": 1}), ("stop_token_ids", [-1])):
        assert ask(small, prompt="a", **{field: value}).json()["error"]["param"] == field


def test_usage_comes_with_each_chunk_where_it_is_asked_for(small):
    told = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(ask(small, prompt="the inn", max_tokens=5, stream=True, stream_options=told))
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted) and counted[-1] == 5 and chunks[0]["usage"]["prompt_tokens"] == 4


def test_bytes_and_places_are_those_of_the_text(small):
    """The model says bytes at random, of which most are no character."""
    fields = {"prompt": "the 日本 inn 😀", "max_tokens": 24, "logprobs": 5, "echo": True, "seed": 3}
    whole = small.post(COMPLETIONS, json={"ignore_eos": True, "temperature": 1.5} | fields).json()["choices"][0]
    logs = whole["logprobs"]
    assert whole["text"].startswith("the 日本 inn 😀") and len(logs["tokens"]) == len(logs["text_offset"])
    assert logs["text_offset"] == sorted(logs["text_offset"]) and logs["text_offset"][-1] <= len(whole["text"])
    assert [whole["text"][offset] for offset in logs["text_offset"][:9]] == list("t 日日日本本本 ")
    assert all(len(top) == 5 for top in logs["top_logprobs"][1:])
    for name, offset in zip(logs["tokens"], logs["text_offset"], strict=True):
        if not name.startswith("bytes:") and name != "<end>":
            assert whole["text"][offset:].startswith(name)
    chunks = events(small.post(COMPLETIONS, json={"ignore_eos": True, "temperature": 1.5, "stream": True} | fields))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [place for part in parts for place in part["text_offset"]] == logs["text_offset"]
    assert [name for part in parts for name in part["tokens"]] == logs["tokens"]


def test_a_conversation_goes_on_with_the_answer(small):
    message = ask(small, CHATS, messages=TURN, max_tokens=6).json()["choices"][0]["message"]
    again = [*TURN, message | {"annotations": [], "tool_calls": None}, *TURN]
    goes_on = ask(small, CHATS, messages=again, max_tokens=6)
    assert goes_on.status_code == 200, goes_on.text
    plain = [*TURN, {"role": "assistant", "content": message["content"]}, *TURN]
    assert goes_on.json()["choices"] == ask(small, CHATS, messages=plain, max_tokens=6).json()["choices"]


def test_bodies_of_clients_over_http(small):
    for sent in combined(24, seed=1):
        body = sent.body | {name: 4 for name in ("max_tokens", "max_completion_tokens") if name in sent.body}
        if body.get("min_tokens") and sent.wrong != "min_tokens":
            del body["min_tokens"]
        response = small.post(sent.path, json=body | ({"model": "plain"} if "model" in body else {}))
        if sent.wrong:
            assert response.status_code == 400 and response.json()["error"]["param"].startswith(sent.wrong), sent
        else:
            assert response.status_code == 200, (sent, response.text)


class TestRequestId:
    def test_is_the_clients_own_where_it_is_sane(self, small):
        for path, given in (("/v1/models", "bench-1.a:b"), ("/nothing", "x"), ("/health", "A" * 128)):
            assert small.get(path, headers={"X-Request-Id": given}).headers["x-request-id"] == given
        stream = small.post(COMPLETIONS, json={"prompt": "a", "stream": True}, headers={"X-Request-Id": "s"})
        assert stream.headers["x-request-id"] == "s"

    def test_is_a_new_one_otherwise(self, small):
        found = [small.get("/v1/models").headers["x-request-id"] for _ in range(2)]
        assert found[0] != found[1] and all(name.isalnum() for name in found)
        for odd in ("A" * 129, "a b", "<x>"):
            assert small.get("/health", headers={"X-Request-Id": odd}).headers["x-request-id"] != odd
        refused = small.post(COMPLETIONS, content=b"{", headers={"Origin": "http://elsewhere"})
        assert refused.status_code == 403 and refused.headers["x-request-id"]


class TestRoles:
    FEW = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}<end>{% endif %}{% endfor %}"
    ALL = "{% for m in messages %}{{ m.role }} {{ m.content }}<end>{% endfor %}{{ mood }}"

    def ids(self, template: str, turns: list[dict[str, str]], **fields: Any) -> list[int]:
        told = {"chat_stop_ids": tuple, "context": 200, "template": ChatTemplate({"default": template}, {})}
        vocabulary = Vocabulary(byte_level(), 260, (), 100, **told)
        asked = parse_as(ChatRequest, {"messages": turns} | fields)
        answers = Answers(SimpleNamespace(), vocabulary, asked, SimpleNamespace(), SimpleNamespace())
        return answers._chat_ids(asked)

    @pytest.mark.parametrize("role", ["tool", "function", "developer"])
    def test_that_the_template_leaves_out_is_refused_by_name(self, role):
        turns = [*TURN, {"role": role, "content": "4"}]
        with pytest.raises(RequestError, match=rf"^messages\[1\]\.role: .* leaves out what '{role}' says"):
            self.ids(self.FEW, turns)
        assert (
            self.ids(self.ALL, turns)[-len(role) - 3 :] == byte_level().encode(f"{role} 4<end>").ids[-len(role) - 3 :]
        )

    def test_a_history_of_tools_is_rendered_once_for_each_role(self, monkeypatch):
        """And not once for each of its turns, which takes the square of their number."""
        rendered, real = [], RENDERER.render
        monkeypatch.setattr(RENDERER, "render", lambda *names: rendered.append(1) or real(*names))
        turns = [{"role": role, "content": "a"} for role in ("user", "tool", "developer") * 30]
        assert len(self.ids("{% for m in messages %}{{ m.content }}{% endfor %}", turns)) == 90
        assert len(rendered) <= 12

    def test_variables_are_the_templates(self):
        assert self.ids(self.ALL, TURN, chat_template_kwargs={"mood": "in"})[-1] == byte_level().encode("in").ids[0]
        told = {"messages": "no", "add_generation_prompt": False}
        assert self.ids(self.ALL, TURN, chat_template_kwargs=told) == self.ids(self.ALL, TURN)


def test_numbers_that_are_none_are_no_answer(small, monkeypatch):
    from firsttoken.engine.request import TokenLogprob
    from firsttoken_serve.http import choice

    real = choice.answer_token
    monkeypatch.setattr(choice, "answer_token", lambda *given: real(*given[:-1], TokenLogprob(float("nan"), ())))
    whole = ask(small, prompt="the inn", max_tokens=3, logprobs=1)
    assert whole.status_code == 500 and whole.json()["error"]["type"] == "server_error"
    streamed = ask(small, prompt="the inn", max_tokens=3, logprobs=1, stream=True)
    events_ = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    assert events_[-1]["error"]["type"] == "server_error" and "NaN" not in streamed.text
