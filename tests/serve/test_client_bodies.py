"""What other people's clients send is taken where it asks for what is done anyway, and refused by name where not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from client_bodies import CHAT_PATH, SAID, Sent, combined, recorded, until_lists

from firsttoken.study.errors import RequestError
from firsttoken_serve.http import neutral
from firsttoken_serve.http.request_schema import ChatRequest, CompletionRequest, ServedRequest, parse_request
from firsttoken_serve.http.response_bodies import Chat

TURN = [{"role": "user", "content": "hi"}]


def parse(path: str, body: dict[str, Any]) -> ServedRequest:
    kind = ChatRequest if path == CHAT_PATH else CompletionRequest
    return parse_request(kind, json.dumps(body).encode())


@pytest.mark.parametrize("sent", recorded(), ids=lambda sent: sent.path)
def test_what_clients_were_seen_to_send_is_taken(sent: Sent):
    parse(sent.path, sent.body)


def test_every_list_of_stops_of_lm_eval_is_taken():
    for until in until_lists():
        assert parse("/v1/completions", {"prompt": "a", "stop": [*until, "<|im_end|>"]}).stop[:-1] == until


def test_2000_bodies_of_clients():
    outcomes = {"taken": 0, "refused": 0}
    for sent in combined(2000, seed=0):
        if sent.wrong:
            with pytest.raises(RequestError) as refusal:
                parse(sent.path, sent.body)
            assert str(refusal.value).startswith(sent.wrong) and "\n" not in str(refusal.value), sent
            outcomes["refused"] += 1
        else:
            parse(sent.path, sent.body)
            outcomes["taken"] += 1
    assert min(outcomes.values()) > 800


@pytest.mark.parametrize("kind, start", [(CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": TURN})])
def test_every_line_of_the_table_changes_nothing_or_is_refused_by_name(kind, start):
    plain = parse_request(kind, json.dumps(start).encode())
    for field, values in (neutral.REQUEST | neutral.DRAWS | kind.neutral).items():
        for value in (None, *values):
            assert parse_request(kind, json.dumps(start | {field: value}).encode()) == plain, field
        with pytest.raises(RequestError, match=f"^{field}: .*; leave it out$"):
            parse_request(kind, json.dumps(start | {field: {"what": "nobody serves"}}).encode())


def test_a_number_is_no_truth():
    for field, wrong in (("store", 0), ("priority", False), ("length_penalty", True), ("id_slot", True)):
        with pytest.raises(RequestError, match=f"^{field}: only "):
            parse("/v1/completions", {"prompt": "a", field: wrong})


def test_where_nothing_is_drawn_the_shape_of_draws_is_nothing():
    for field, value in (("top_a", 0.1), ("typical_p", 0.5)):
        parse("/v1/completions", {"prompt": "a", "temperature": 0, field: value})
        for told in ({"temperature": 0.5, field: value}, {field: value}, {"temperature": 0, field: "1"}):
            with pytest.raises(RequestError, match=f"^{field}: only "):
                parse("/v1/completions", {"prompt": "a"} | told)


def test_the_best_of_as_many_as_are_told_are_all_of_them():
    parse("/v1/completions", {"prompt": "a", "n": 3, "best_of": 3})
    parse("/v1/completions", {"prompt": "a", "temperature": 0, "do_sample": False})
    with pytest.raises(RequestError, match="only true is served"):
        parse("/v1/completions", {"prompt": "a", "do_sample": False})


def test_no_more_tokens_at_least_than_at_most():
    asked = {"prompt": "a", "min_tokens": 8}
    for more in ({}, {"stop": "x"}, {"ignore_eos": True, "max_tokens": 8}):
        assert parse("/v1/completions", asked | more).min_tokens == 8
    with pytest.raises(RequestError, match="min_tokens: 8 are more"):
        parse("/v1/completions", asked | {"max_tokens": 7})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"stream_options": {"X": 1}}, "stream_options.X: unknown key; known: continuous_usage_stats, "),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation: only false is served"),
        ({"messages": [*TURN, {"role": "user", "content": "a", "X": 1}]}, "messages[1].X: unknown key; known: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "X": 1}]}]},
            "messages[0].content[0].X: unknown key; known: type, text",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]: a part is an object"),
        ({"top_logprobs": 5, "logprobs": False}, "top_logprobs: it goes with logprobs"),
    ],
)
def test_an_error_names_the_object_at_fault(fields, message):
    with pytest.raises(RequestError) as refusal:
        parse(CHAT_PATH, {"messages": TURN} | fields)
    assert str(refusal.value).startswith(message)


def test_no_likeliest_may_be_asked_for_without_likelihoods():
    assert parse(CHAT_PATH, {"messages": TURN, "top_logprobs": 0}).top_count is None
    assert parse("/v1/completions", {"prompt": "a", "logprobs": False}).top_count is None


class TestHistory:
    """What an answer said is what a request may say."""

    def dumps(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The ways in which the official client, litellm and langchain hand a message on."""
        left_out = {"annotations": None, "audio": None, "function_call": None, "tool_calls": None}
        without = {key: value for key, value in message.items() if value is not None}
        own = {"provider_specific_fields": {"refusal": None}, "annotations": [], "tool_calls": []}
        return [message, message | left_out, without, without | own, without | {"reasoning_content": None}]

    @pytest.mark.parametrize("text", ["hi", "", "日本 😀", '{"a": null}'])
    def test_an_answer_of_ours_goes_on(self, text):
        reply = Chat.new("tiny")
        whole = reply.answer(0, text, "stop", None)["message"]
        parts = [
            reply.role_delta(0),
            *(reply.delta(0, one, None, None) for one in text),
            reply.delta(0, "", "stop", None),
        ]
        assembled: dict[str, Any] = {}
        for part in parts:
            for key, value in part["delta"].items():
                assembled[key] = assembled.get(key, "") + value
        plain = parse(CHAT_PATH, {"messages": [*TURN, {"role": "assistant", "content": text}, *TURN]})
        for message in (*self.dumps(whole), *self.dumps(assembled)):
            assert parse(CHAT_PATH, {"messages": [*TURN, message, *TURN]}) == plain

    @pytest.mark.parametrize("turn", [{}, {"content": None}, {"content": []}, {"content": ""}])
    def test_a_turn_of_the_assistant_may_have_no_text(self, turn):
        asked = parse(CHAT_PATH, {"messages": [*TURN, {"role": "assistant"} | turn, *TURN]})
        assert asked.messages[1].content == ""

    def test_what_would_change_the_prompt_is_refused_by_name(self):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for field, value in (("tool_calls", [call]), ("refusal", "no"), ("audio", {"id": "a"}), ("function_call", {})):
            with pytest.raises(RequestError, match=rf"^messages\[1\]\.{field}: .*; leave it out$"):
                parse(CHAT_PATH, {"messages": [*TURN, {"role": "assistant", "content": "a", field: value}]})

    def test_roles_and_their_fields_are_for_the_template(self):
        turns = [
            {"role": "developer", "content": "be brief"},
            {"role": "tool", "content": "4", "tool_call_id": "c"},
            {"role": "function", "content": "4", "name": "f"},
            {"role": "assistant", "content": "four", "reasoning_content": "2 and 2"},
        ]
        asked = parse(CHAT_PATH, {"messages": turns})
        assert [{k: v for k, v in vars(turn).items() if v is not None} for turn in asked.messages] == turns

    def test_a_null_is_the_same_as_nothing_at_any_depth(self):
        part = {"type": "text", "text": "hi", "cache_control": None}
        asked = parse(CHAT_PATH, {"messages": [{"role": "user", "content": [part], "name": None}]})
        assert asked == parse(CHAT_PATH, {"messages": TURN})
        told = {"stream": True, "stream_options": {"include_usage": None}}
        assert not parse("/v1/completions", {"prompt": "a"} | told).stream_options.include_usage


def test_what_is_said_here_is_said_of_fields_that_are_known():
    served = CompletionRequest.__dataclass_fields__
    known = {*neutral.REQUEST, *neutral.DRAWS, *neutral.OF_THE_CLIENT, *served, "best_of"}
    assert {*SAID} - known <= {"chat_template_kwargs", "no_such_field"}
