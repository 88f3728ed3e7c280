"""Which requests are served, which are refused, and how the refusals read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.study.errors import RequestError
from firsttoken_serve.http.request_schema import ChatRequest, CompletionRequest, parse_request

TURN = [{"role": "user", "content": "hi"}]
PROMPTS = "prompt: expected a text, a list of token ids, or a list of texts or of such lists"


def parse(kind=CompletionRequest, **fields):
    return parse_request(kind, json.dumps(fields).encode())


def test_a_prompt_is_enough():
    asked = parse(prompt="hi")
    assert (asked.prompt, asked.max_tokens, asked.stop, asked.stream, asked.upgrade) == (["hi"], None, [], False, False)
    assert (asked.temperature, asked.top_p, asked.n, asked.seed, asked.top_count) == (1.0, 1.0, 1, None, None)
    assert not asked.stream_options.include_usage and not asked.echo
    chat = parse(ChatRequest, messages=TURN)
    assert (chat.messages[0].role, chat.messages[0].content, chat.top_logprobs) == ("user", "hi", None)


def test_all_that_is_served():
    asked = parse(
        model="m",
        prompt=[1, 2],
        max_tokens=3,
        n=2,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        seed=5,
        temperature=0.5,
        top_p=0.9,
        logprobs=4,
        echo=True,
        upgrade=True,
    )
    assert asked.model == "m" and asked.prompt == [[1, 2]] and asked.max_tokens == 3 and asked.stop == ["a", "b"]
    assert asked.stream and asked.stream_options.include_usage and asked.upgrade and asked.echo
    assert (asked.n, asked.seed, asked.temperature, asked.top_p, asked.top_count) == (2, 5, 0.5, 0.9, 4)
    assert parse(prompt="hi", stop="x").stop == ["x"]
    assert parse(prompt=["a", "b"]).prompt == ["a", "b"] and parse(prompt=[[1], [2, 3]]).prompt == [[1], [2, 3]]
    chat = parse(ChatRequest, messages=TURN, max_completion_tokens=3, logprobs=True, top_logprobs=2, temperature=1)
    assert (chat.max_completion_tokens, chat.top_logprobs, chat.temperature) == (3, 2, 1.0)
    assert parse(ChatRequest, messages=TURN, logprobs=True).top_count == 0


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "prompt: missing key"),
        ({"prompt": None}, "prompt: missing key"),
        ({"prompt": 5}, PROMPTS),
        ({"prompt": ["one", 2]}, PROMPTS),
        ({"prompt": [[1, 2], "one"]}, PROMPTS),
        ({"prompt": [True]}, PROMPTS),
        ({"prompt": [[]]}, PROMPTS),
        ({"prompt": []}, "prompt: it is empty; give at least one"),
        ({"prompt": "hi", "temperature": -0.1}, "temperature: expected 0 to 2, not -0.1"),
        ({"prompt": "hi", "temperature": 2.1}, "temperature: expected 0 to 2, not 2.1"),
        ({"prompt": "hi", "temperature": "1"}, "temperature: expected float, not '1'"),
        ({"prompt": "hi", "temperature": True}, "temperature: expected float, not True"),
        ({"prompt": "hi", "top_p": 0}, "top_p: expected more than 0 and at most 1, not 0"),
        ({"prompt": "hi", "top_p": 1.5}, "top_p: expected more than 0 and at most 1, not 1.5"),
        ({"prompt": "hi", "n": 0}, "n: expected 1 or more, not 0"),
        ({"prompt": "hi", "n": 1.5}, "n: expected int, not 1.5"),
        ({"prompt": "hi", "seed": 2**63}, "seed: "),
        ({"prompt": "hi", "seed": 10**30}, "the body is no JSON: the number 1000"),
        ({"prompt": "hi", "best_of": 3}, "best_of: only 1 is served; leave it out"),
        ({"prompt": "hi", "echo": 1}, "echo: expected bool, not 1"),
        ({"prompt": "hi", "logprobs": 21}, "logprobs: expected 0 to 20, not 21"),
        ({"prompt": "hi", "logprobs": -1}, "logprobs: expected 0 to 20, not -1"),
        ({"prompt": "hi", "logprobs": True}, "logprobs: expected int, not True"),
        ({"prompt": "hi", "logit_bias": {"5": 101}}, "logit_bias['5']: expected -100 to 100, not 101"),
        ({"prompt": "hi", "logit_bias": {"a": 1}}, "logit_bias: expected token ids as keys, not {'a': 1}"),
        ({"prompt": "hi", "logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias: expected 1,024 at most"),
        ({"prompt": "hi", "presence_penalty": 2.1}, "presence_penalty: expected -2 to 2, not 2.1"),
        ({"prompt": "hi", "repetition_penalty": 0}, "repetition_penalty: expected 0.01 to 100, not 0"),
        ({"prompt": "hi", "top_k": -2}, "top_k: expected -1 or more, not -2"),
        ({"prompt": "hi", "min_p": 1.01}, "min_p: expected 0 to 1, not 1.01"),
        ({"prompt": "hi", "stop_token_ids": ["a"]}, "stop_token_ids[0]: expected int, not 'a'"),
        ({"prompt": "hi", "max_token": 5}, "max_token: unknown key; known: cache_salt, echo, "),
        ({"prompt": "hi", "max_tokens": 0}, "max_tokens: "),
        ({"prompt": "hi", "max_tokens": -5}, "max_tokens: "),
        ({"prompt": "hi", "max_tokens": "5"}, "max_tokens: "),
        ({"prompt": "hi", "max_tokens": 1.5}, "max_tokens: "),
        ({"prompt": "hi", "stop": ["a"] * 65}, "stop: expected 64 at most, not "),
        ({"prompt": "hi", "stop": ["a" * 2049] * 2}, "stop: expected texts of at most 4,096 characters together, not "),
        ({"prompt": "hi", "stop": ""}, "stop[0]: "),
        ({"prompt": "hi", "stop": [1]}, "stop[0]: "),
        ({"prompt": "hi", "cache_salt": ""}, "cache_salt: expected a text, not ''"),
        ({"prompt": "hi", "cache_salt": "a" * 1025}, "cache_salt: expected 1,024 at most, not "),
        ({"prompt": "hi", "cache_salt": 7}, "cache_salt: expected str, not 7"),
        ({"prompt": "hi", "stream": "yes"}, "stream: "),
        ({"prompt": "hi", "stream_options": {"usage": True}}, "stream_options.usage: unknown key; known: "),
        ({"prompt": "hi", "stream_options": {"include_usage": True}}, "stream_options: it is for streams"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(fields, message):
    with pytest.raises(RequestError) as refusal:
        parse(**fields)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "messages: missing key"),
        ({"messages": []}, "messages: expected at least one, not []"),
        ({"messages": "hi"}, "messages: expected list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: missing key"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "messages[0].role: 'critic' is not known; known: "),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content: expected str | list",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0].type: 'image_url' is not served",
        ),
        ({"messages": TURN, "prompt": "hi"}, "prompt: unknown key; known: "),
        ({"messages": TURN, "logprobs": 2}, "logprobs: expected bool, not 2"),
        ({"messages": TURN, "top_logprobs": 21}, "top_logprobs: "),
        ({"messages": TURN, "tools": [{"type": "function"}]}, "tools: only [] is served; leave it out"),
        ({"messages": TURN, "response_format": {"type": "json_object"}}, "response_format: only "),
        ({"messages": TURN, "max_completion_tokens": 0}, "max_completion_tokens: "),
    ],
)
def test_a_chat_that_cannot_be_is_refused_in_one_line(fields, message):
    with pytest.raises(RequestError) as refusal:
        parse(ChatRequest, **fields)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"hi"',
        b"\xff\xfe\xfd",
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "prompt": "b"}',
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(RequestError, match="the body is no JSON"):
        parse_request(CompletionRequest, body)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [*CompletionRequest.__dataclass_fields__, *ChatRequest.__dataclass_fields__, "tools", "best_of", "x"]
)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@given(content=st.dictionaries(FIELDS, ANYTHING, max_size=5))
def test_whatever_is_sent_is_taken_or_refused_in_one_line(kind, content):
    try:
        parse_request(kind, json.dumps(content).encode())
    except RequestError as refusal:
        assert "\n" not in str(refusal)
