"""Drafts in the service: who asks for them sees them come and go, and every answer is the whole model's."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from services import (
    CHATS,
    COMPLETIONS,
    GREEDY,
    TIMEOUT_S,
    byte_level,
    events,
    serving,
    stage_1_alone,
    tiny_model,
    tiny_tokenizer,
    until,
)

from firsttoken.engine.stream import TokenEvent
from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken_serve.chat.text import Vocabulary
from firsttoken_serve.http.choice import AnswerChoice, TextDelta

VOCABULARY = Vocabulary(byte_level(), 260, (), 1000, chat_stop_ids=lambda: (), context=1000, template=SimpleNamespace())


class Client:
    """What a client shows: ``text`` in black, and the provisional ``grey`` behind it."""

    def __init__(self) -> None:
        self.text, self.grey, self.retracted = "", "", 0

    def take(self, draft: str, retract: int, text: str) -> None:
        """Read an event as the page does: what is retracted goes, what is added comes, what is said leaves the grey."""
        assert retract <= len(self.grey), "more is retracted than was drafted"
        self.grey = self.grey[: len(self.grey) - retract] + draft
        assert text.startswith(self.grey) or self.grey.startswith(text), "what was not retracted is not what comes"
        self.text, self.grey, self.retracted = self.text + text, self.grey[len(text) :], self.retracted + retract


def choice_of(**options: Any) -> AnswerChoice:
    return AnswerChoice(0, VOCABULARY, [5], SimpleNamespace(), **({"stop_ids": (), "stops": ()} | options))


def shown(choice: AnswerChoice, drafts: list[int], final: list[int]) -> tuple[Client, list[TextDelta]]:
    client, deltas = Client(), []
    for token, draft in [*((token, True) for token in drafts), *((token, False) for token in final)]:
        if not choice.finished:
            deltas += choice.push(TokenEvent(token, 1 if draft else 3, 0.0, None, draft))
    deltas += choice.end()
    for delta in deltas:
        client.take(delta.draft, delta.retract, delta.text)
    assert not client.grey, "a draft stays behind the answer"
    return client, deltas


def test_what_stays_is_never_retracted_and_what_goes_is_counted_in_characters() -> None:
    """2,000 drafts of letters, some of several bytes, of which a random number stays; with stops and without."""
    rng, retracted, stopped = random.Random(0), 0, 0
    letters = [VOCABULARY.tokenizer.encode(text).ids for text in ("a", "b", "the", "\u00e9", "\u2603", "\U0001f600")]
    for _ in range(2000):
        drafts = [token for _ in range(rng.randint(0, 8)) for token in rng.choice(letters)]
        cut = rng.randint(0, len(drafts))
        final = drafts[:cut] + [token for _ in range(rng.randint(1, 4)) for token in rng.choice(letters)]
        stops = rng.choice(((), ("ab",), ("b", "the")))
        client, deltas = shown(choice_of(stops=stops, provisional=True), drafts, final)
        plain, same = shown(choice_of(stops=stops), drafts, final)
        assert client.text == plain.text and not plain.retracted
        reasons = [[delta.finish_reason for delta in all_of if delta.finish_reason] for all_of in (deltas, same)]
        assert reasons[0] == reasons[1] and not any(delta.draft or delta.retract for delta in same)
        retracted += client.retracted > 0
        stopped += bool(stops) and not any(stop in client.text for stop in stops)
    assert retracted > 300 and stopped > 300


def test_a_draft_ends_before_a_stop_text_and_is_retracted_behind_one() -> None:
    ids = {letter: VOCABULARY.tokenizer.encode(letter).ids[0] for letter in "abcx"}
    client, deltas = shown(choice_of(stops=("x",), provisional=True), [ids[i] for i in "abxc"], [ids[i] for i in "abx"])
    assert [delta.draft for delta in deltas if delta.draft] == ["a", "b"] and client.text == "ab"
    client, deltas = shown(choice_of(stops=("x",), provisional=True), [ids[i] for i in "abcc"], [ids[i] for i in "axb"])
    assert client.text == "a" and client.retracted == 3 and deltas[-1].finish_reason == "stop"


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in stages whose missing layers change few tokens."""
    folder, model = tmp_path_factory.mktemp("drafts") / "tiny", tiny_model()
    for layer in model.model.layers[1:5]:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.data *= 0.1
    source = ModelSource(model, tiny_tokenizer(), Origin("tiny", "5e12" * 16, "real"))
    write_staged(source, staged(source.names, StagePlan.from_block(6, range(1, 5))), folder)
    return folder


@pytest.fixture
def held(growing: Path) -> Callable[..., Any]:
    """Makes a service whose first stage answers, and a function that lets the others come, or fails them."""
    return partial(stage_1_alone, growing, max_new_tokens=400)


def parked(url: str) -> int:
    """How many wait for the whole model, once nobody runs."""
    engine = httpx.get(f"{url}/stage").json()["engine"]
    return 0 if engine["running"] else engine["waiting"]


def ask(url: str, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    asked = (
        {"max_tokens": 24, "stream_options": {"include_usage": True} if fields.get("stream") else None}
        | ({"prompt": "the inn"} if path == COMPLETIONS else {"messages": TURNS})
        | fields
    )
    return httpx.post(f"{url}{path}", json=asked, timeout=TIMEOUT_S)


TURNS = [{"role": "user", "content": "the hen"}]
ASKED = [
    GREEDY | {"seed": 1},
    GREEDY | {"logprobs": 2},
    {"seed": 7, "temperature": 0.7},
    GREEDY | {"stop": ["e"], "min_tokens": 3},
    GREEDY | {"stop_token_ids": [104], "n": 2},
]


def read(chunks: list[dict[str, Any]]) -> tuple[dict[int, Client], list[Any]]:
    """What a client of a stream shows, by choice; and the rest of what it was told."""
    clients: dict[int, Client] = {}
    others = []
    for chunk in chunks:
        for one in chunk["choices"]:
            change = one.get("provisional", {})
            text = one["text"] if "text" in one else one["delta"].get("content", "")
            clients.setdefault(one["index"], Client()).take(change.get("text", ""), change.get("retract", 0), text)
            if one["finish_reason"]:
                others.append((one["index"], one["finish_reason"]))
        if chunk.get("usage"):
            others.append(chunk["usage"])
    return clients, others


def test_every_answer_is_the_whole_models_and_drafts_go_to_who_asks(held, growing) -> None:
    with held() as (url, let_come), ThreadPoolExecutor(20) as pool:
        ways = [{"stream": True, "provisional": True}, {"stream": True, "provisional": False}, {"provisional": False}]
        asks = [pool.submit(ask, url, **(fields | way)) for fields in ASKED for way in ways]
        chats = pool.submit(ask, url, CHATS, **GREEDY, stream=True, provisional=True)
        until(lambda: parked(url) == 3 * (len(ASKED) + 1) + 1, "all have drafted")  # one of them asks for two
        let_come()
        answers = [one.result() for one in asks]
        assert httpx.get(f"{url}/stage").json()["sessions"] == 0
        chat = read(events(chats.result()))[0][0]
        whole = [ask(url, **fields).json() for fields in ASKED]
        whole_chat = ask(url, CHATS, **GREEDY).json()["choices"][0]["message"]["content"]
    assert chat.text == whole_chat
    retracted = seen = 0
    for fields, expected, (drafted, final, at_once) in zip(
        ASKED, whole, zip(*[iter(answers)] * 3, strict=True), strict=True
    ):
        texts = [one["text"] for one in expected["choices"]]
        clients, others = read(events(drafted))
        plain, same = read(events(final))
        assert [clients[n].text for n in sorted(clients)] == [plain[n].text for n in sorted(plain)] == texts
        assert sorted(map(str, others)) == sorted(map(str, same)) and "provisional" not in final.text
        seen += '"provisional"' in drafted.text  # what a draft says may be no text: half of a character
        body = at_once.json()
        assert [one["text"] for one in body["choices"]] == texts and body["usage"] == expected["usage"]
        assert [one["finish_reason"] for one in body["choices"]] == [
            one["finish_reason"] for one in expected["choices"]
        ]
        if "logprobs" in fields:
            logs, own = (one["choices"][0]["logprobs"] for one in (body, expected))
            assert logs["tokens"] == own["tokens"] and logs["text_offset"] == own["text_offset"]
            assert logs["token_logprobs"] == pytest.approx(own["token_logprobs"], abs=1e-3)
        retracted += sum(client.retracted for client in clients.values())
    assert retracted and seen > 2, "no draft was wrong, or nobody saw one"


def test_who_leaves_takes_the_drafts_along(held) -> None:
    with held() as (url, let_come):
        fields = GREEDY | {"prompt": "the inn", "stream": True, "provisional": True, "max_tokens": 300}
        with httpx.stream("POST", f"{url}{COMPLETIONS}", json=fields, timeout=TIMEOUT_S) as response:
            next(response.iter_lines())
        until(lambda: httpx.get(f"{url}/stage").json()["sessions"] == 0, "the drafts of who left are gone")
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(ask, url, **(fields | {"max_tokens": 8}))
            until(lambda: parked(url) == 1, "a draft waits")
            let_come()
            assert events(left.result())[-2]["choices"][0]["finish_reason"] == "length"


def test_drafts_that_nothing_verifies_end_in_an_error(held, growing) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(grace_s=0.1) as (url, _):
            fields = GREEDY | {"prompt": "the inn", "stream": True, "provisional": True, "max_tokens": 8}
            left = pool.submit(ask, url, **fields)
            until(lambda: parked(url) == 1, "a draft waits")
        text = left.result().text
    assert '"provisional"' in text and '"error"' in text and '"finish_reason": "' not in text


def test_what_drafts_do_not_go_with(growing) -> None:
    with serving(growing) as url:
        refused = [
            ({"provisional": True}, "provisional: drafts are for streams"),
            ({"provisional": True, "stream": True, "echo": True}, "provisional: no drafts stand behind an echo"),
            ({"provisional": "yes"}, "provisional: "),
        ]
        for fields, why in refused:
            response = ask(url, **fields)
            assert response.status_code == 400 and response.json()["error"]["message"].startswith(why)
        chunks = events(ask(url, **GREEDY, stream=True, provisional=True))  # all stages are here: nothing to draft
        assert not any("provisional" in one for chunk in chunks for one in chunk["choices"])
