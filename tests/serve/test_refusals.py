"""What a replica refuses over real HTTP, and in which words."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("starlette")

from services import CHATS, COMPLETIONS, ENDLESS, GREEDY


class TestRefusals:
    @pytest.mark.parametrize(
        "request_, status, code, message",
        [
            ((COMPLETIONS, b"{"), 400, "bad_request", "the body is no JSON"),
            ((COMPLETIONS, b'{"prompt": "hi", "n": 9}'), 400, "bad_request", "n: 9 answers, and the limit is 8"),
            (
                (COMPLETIONS, json.dumps({"prompt": ["hi"] * 13}).encode()),
                *(400, "bad_request", "prompt: 13 with n=1 are more answers than the 12 served"),
            ),
            ((COMPLETIONS, b'{"prompt": ""}'), 400, "bad_request", "prompt: it is empty"),
            ((COMPLETIONS, b'{"prompt": [260]}'), 400, "bad_request", "prompt: the model has no token 260"),
            (
                (COMPLETIONS, json.dumps({"prompt": "a" * 65}).encode()),
                *(400, "context_length_exceeded", "prompt: 65 tokens, and the limit is 64"),
            ),
            (
                (COMPLETIONS, json.dumps({"prompt": "a" * 1000}).encode()),
                *(400, "context_length_exceeded", "prompt: 1000 characters cannot be 64 tokens, the limit"),
            ),
            (
                (COMPLETIONS, b'{"prompt": "a", "max_tokens": 9001}'),
                400,
                "bad_request",
                "max_tokens is 9001; 1 to 9000",
            ),
            (
                (COMPLETIONS, b'{"prompt": "hi", "model": "gpt"}'),
                *(404, "not_found", "model: 'gpt' is not served here; 'tiny' is"),
            ),
            ((CHATS, b'{"messages": [{"role": "user", "content": "a"}], "model": "gpt"}'), 404, "not_found", "model: "),
            ((COMPLETIONS, b" " * 1_000_001), 413, "body_too_large", "larger than 1,000,000 bytes"),
            (("/v1/nothing", b"{}"), 404, "not_found", "nothing is served at /v1/nothing; there are "),
        ],
    )
    def test_name_what_is_wrong_as_openai_does(self, client, request_, status, code, message):
        path, content = request_
        response = client.post(path, content=content)
        assert response.status_code == status
        error = response.json()["error"]
        assert error["code"] == code and message in error["message"] and error["type"] == "invalid_request_error"
        assert error["param"] == (message.partition(":")[0] if re.match(r"[a-z_]+: ", message) else None)

    def test_a_method_says_which_others_there_are(self, client):
        response = client.get(COMPLETIONS)
        assert response.status_code == 405 and response.headers["allow"] == "POST"
        assert response.json()["error"]["code"] == "method_not_allowed"

    def test_a_redirect_repeats_no_host(self, client):
        response = client.get("/v1/models/", headers={"Host": "localhost:1"})
        assert response.status_code == 404 and "location" not in response.headers

    def test_a_body_that_never_ends_is_not_read_to_its_end(self, client):
        sent = []

        def endless():
            while True:
                sent.append(len(sent))
                yield b" " * 100_000

        assert client.post(COMPLETIONS, content=endless()).status_code == 413 and len(sent) <= 100

    def test_one_request_too_many_is_told_to_come_back(self, client):
        # greedy, for what is drawn may end at once; and long: 400 tokens were over before the refusal came once
        body = GREEDY | {"prompt": [ENDLESS] * 12, "max_tokens": 9000, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as held:
            chunks = held.iter_raw()  # without a name it would be closed, and the connection with it
            next(chunks)
            refused = client.post(COMPLETIONS, json={"prompt": "the inn"})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error" and refused.json()["error"]["code"] == "busy"
