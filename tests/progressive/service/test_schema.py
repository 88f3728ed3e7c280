"""Which completions are served, which are refused, and how the refusals read."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pydantic")

from firsttoken.progressive.service.schema import parse_request
from firsttoken.study.errors import RequestError


def parse(**fields):
    return parse_request(json.dumps(fields).encode())


def test_a_prompt_is_enough():
    asked = parse(prompt="hi")
    assert (asked.prompt, asked.max_tokens, asked.stop, asked.stream, asked.upgrade) == ("hi", 16, [], False, False)
    assert not asked.stream_options.include_usage


def test_all_that_is_served():
    asked = parse(
        model="m",
        prompt=[1, 2],
        max_tokens=3,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        upgrade=True,
    )
    assert asked.model == "m" and asked.prompt == [1, 2] and asked.max_tokens == 3 and asked.stop == ["a", "b"]
    assert asked.stream and asked.stream_options.include_usage and asked.upgrade
    assert parse(prompt="hi", stop="x").stop == ["x"]


def test_what_changes_nothing_may_be_said():
    neutral = {"temperature": 0.0, "n": 1, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}}
    ignored = {"user": "me", "seed": 7, "top_p": 0.9, "presence_penalty": 0.0}
    empty = {"logprobs": None, "stop": None, "max_tokens": None, "temperature": None, "stream_options": None}
    assert parse(prompt="hi", **(neutral | ignored)) == parse(prompt="hi", **empty) == parse(prompt="hi")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "prompt: missing, and required"),
        ({"prompt": None}, "prompt: missing, and required"),
        ({"prompt": 5}, "prompt: expected a text or a list of token ids, one prompt a request"),
        ({"prompt": ["one", "two"]}, "prompt: expected a text or a list of token ids, one prompt a request"),
        ({"prompt": [[1, 2]]}, "prompt: expected a text or a list of token ids, one prompt a request"),
        ({"prompt": [True]}, "prompt: expected a text or a list of token ids, one prompt a request"),
        ({"prompt": "hi", "temperature": 0.7}, "temperature: only 0 is served (greedy decoding); leave it out"),
        ({"prompt": "hi", "n": 2}, "n: only 1 is served; leave it out"),
        ({"prompt": "hi", "best_of": 3}, "best_of: only 1 is served; leave it out"),
        ({"prompt": "hi", "echo": True}, "echo: only false is served; leave it out"),
        ({"prompt": "hi", "logprobs": 0}, "logprobs: this is not served; leave it out"),
        ({"prompt": "hi", "logit_bias": {"5": 1}}, "logit_bias: only {} is served; leave it out"),
        ({"prompt": "hi", "max_token": 5}, "max_token: unknown field; known: prompt, model, max_tokens, stop, "),
        ({"prompt": "hi", "max_tokens": 0}, "max_tokens: "),
        ({"prompt": "hi", "max_tokens": "5"}, "max_tokens: "),
        ({"prompt": "hi", "max_tokens": 1.5}, "max_tokens: "),
        ({"prompt": "hi", "stop": ["a"] * 5}, "stop: "),
        ({"prompt": "hi", "stop": ""}, "stop.0: "),
        ({"prompt": "hi", "stop": [1]}, "stop.0: "),
        ({"prompt": "hi", "stream": "yes"}, "stream: "),
        ({"prompt": "hi", "stream_options": {"usage": True}}, "stream_options.usage: unknown field"),
    ],
)
def test_what_would_change_the_answer_is_refused_in_one_line(fields, message):
    with pytest.raises(RequestError) as refusal:
        parse(**fields)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"hi"', b"\xff\xfe\xfd", b"[" * 100_000, b'{"prompt": "\\ud800"}']
)
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(RequestError, match="the body is no JSON"):
        parse_request(body)
