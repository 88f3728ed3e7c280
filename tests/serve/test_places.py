"""Bytes of tokens and their places in what was said, held against the text itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from services import byte_fallback, byte_level
from tokenizers import Tokenizer

from firsttoken.engine.async_engine import TokenEvent
from firsttoken.engine.request import TokenLogprob
from firsttoken_serve.chat.chat_template import ChatTemplate
from firsttoken_serve.chat.text import Vocabulary
from firsttoken_serve.http.choice import AnswerChoice, TextDelta
from firsttoken_serve.http.logprobs_format import AnswerToken, answer_token, as_chat, as_completion
from firsttoken_serve.http.response_bodies import event

same_fixture = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
TEXTS = st.one_of(st.text(max_size=20), st.text(alphabet="the in 日本é😀\ufffd\u200d👨👩n\u0308<>\n", max_size=20))
END = "<end>"


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    told = {"chat_stop_ids": tuple, "context": 20_000, "template": ChatTemplate({}, {})}
    return Vocabulary(tokenizer, tokenizer.get_vocab_size(), (), 10_000, **told)


VOCABULARIES = {"byte level": vocabulary_of(byte_level()), "byte fallback": vocabulary_of(byte_fallback())}


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return VOCABULARIES[request.param]


@pytest.fixture(scope="module")
def smollm() -> Vocabulary:
    from firsttoken.assets.gguf import PINNED, converted
    from firsttoken.study.errors import FirstTokenError
    from firsttoken_serve.chat.text import read_vocabulary

    try:
        return read_vocabulary(converted(PINNED, hashed=False), None)
    except FirstTokenError as error:
        pytest.skip(str(error))


def answered(
    vocabulary: Vocabulary, prompt: Sequence[int], ids: Sequence[int], echo: str = "", stops: Sequence[str] = ()
) -> list[TextDelta]:
    """What a choice makes of an engine that says ``ids``."""
    request = SimpleNamespace(prompt_logprobs=[TokenLogprob(-1.0, ())] * (len(prompt) - 1))
    session = SimpleNamespace(request=request)
    choice = AnswerChoice(0, vocabulary, prompt, session, stop_ids=(), stops=stops, echo=echo, logprobs=True)
    deltas: list[TextDelta] = []
    for token_id in ids:
        if not choice.finished:
            deltas += choice.push(TokenEvent(token_id, 1, 0.0, TokenLogprob(-0.5, ())))
    return deltas + choice.end()


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: list[TextDelta]) -> list[AnswerToken]:
    return [one for delta in deltas for one in delta.logprobs or ()]


def expected_places(text: str, spelt: Sequence[bytes]) -> list[int]:
    """Of each token, the character that its first byte is in, by looking."""
    whole = text.encode()
    assert b"".join(spelt) == whole
    character = [number for number, letter in enumerate(text) for _ in letter.encode()] + [len(text)]
    return [character[sum(map(len, spelt[:number]))] for number in range(len(spelt))]


class TestAnswers:
    @same_fixture
    @given(TEXTS)
    @example("Hi 😀 naïve 日本")
    def test_bytes_joined_are_what_was_said_and_places_are_exact(self, vocabulary, text):
        prompt = vocabulary.tokenizer.encode("in").ids
        ids = vocabulary.tokenizer.encode(text).ids
        deltas = answered(vocabulary, prompt, ids)
        chat = as_chat(tokens_of(deltas))["content"]
        assert b"".join(bytes(one["bytes"]) for one in chat) == text_of(deltas).encode()
        spelt = [bytes(one["bytes"]) for one in chat]
        assert as_completion(tokens_of(deltas))["text_offset"] == expected_places(text_of(deltas), spelt)
        assert len(chat) == len(ids)

    @same_fixture
    @given(TEXTS, st.integers(0, 20))
    @example("日", 1)
    @example("the \ufffd", 5)
    def test_bytes_of_an_answer_that_is_cut_within_a_character_are_what_it_shows(self, vocabulary, text, count):
        ids = vocabulary.tokenizer.encode(text).ids[: 1 + count]
        deltas = answered(vocabulary, vocabulary.tokenizer.encode("in").ids, ids)
        chat = as_chat(tokens_of(deltas))["content"]
        assert b"".join(bytes(one["bytes"]) for one in chat) == text_of(deltas).encode() and len(chat) == len(ids)

    @same_fixture
    @given(TEXTS, TEXTS)
    def test_an_echo_comes_first_and_is_counted(self, vocabulary, before, text):
        prompt, ids = vocabulary.tokenizer.encode(before).ids, vocabulary.tokenizer.encode(text).ids
        if not prompt or not ids:
            return
        deltas = answered(vocabulary, prompt, ids, echo=before)
        found = as_completion(tokens_of(deltas))
        shown = text_of(deltas)
        assert shown.startswith(before) and len(found["tokens"]) == len(prompt) + len(ids)
        assert found["text_offset"] == sorted(found["text_offset"]) and max(found["text_offset"]) <= len(shown)
        if vocabulary is VOCABULARIES["byte level"]:
            spelt = [vocabulary.spelling.spelt(i) for i in (*prompt, *ids)]
            assert found["text_offset"] == expected_places(shown, spelt)

    @same_fixture
    @given(st.lists(st.integers(0, 259), max_size=12), st.lists(st.integers(0, 259), min_size=1, max_size=12))
    def test_bytes_that_are_no_text_have_the_places_of_what_they_are_shown_as(self, prompt, ids):
        vocabulary = VOCABULARIES["byte level"]
        deltas = answered(vocabulary, [257, *prompt], ids)
        shown, tokens = text_of(deltas), tokens_of(deltas)
        assert len(tokens) == len(ids)
        places = [one.offset for one in tokens]
        assert places == sorted(places) and places[-1] <= len(shown)
        for number, one in enumerate(tokens):  # a token that is whole characters reads as the text from its place on
            name = one.token.name
            follows = number + 1 < len(tokens)
            if one.token.spelt and not name.startswith("bytes:") and follows:
                assert shown[one.offset :].startswith(name)

    @same_fixture
    @given(TEXTS, st.text(alphabet="the in日😀", min_size=1, max_size=3))
    def test_no_token_stands_behind_a_stop(self, vocabulary, text, stop):
        ids = vocabulary.tokenizer.encode(text).ids
        deltas = answered(vocabulary, vocabulary.tokenizer.encode("in").ids, ids, stops=[stop])
        shown, tokens = text_of(deltas), tokens_of(deltas)
        assert stop not in shown
        if deltas[-1].finish_reason == "stop":
            assert all(one.offset < len(shown) for one in tokens)
            assert b"".join(one.token.spelt for one in tokens).startswith(shown.encode())
        else:
            assert len(tokens) == len(ids)

    @same_fixture
    @given(TEXTS)
    def test_a_likelihood_comes_with_its_text(self, vocabulary, text):
        shown = 0
        for delta in answered(vocabulary, vocabulary.tokenizer.encode("in").ids, vocabulary.tokenizer.encode(text).ids):
            shown += len(delta.text)
            assert all(one.offset < shown or delta.finish_reason for one in delta.logprobs or ())

    @same_fixture
    @given(TEXTS, st.sampled_from([[END], ["in", f"{END}\n"], [f"the{END}"], ["h", f" {END}{END}"], [f"{END[1:]}"]]))
    def test_a_stop_may_be_a_special_token_or_hold_one(self, vocabulary, text, stops):
        """What no text shows ends an answer like what it does."""
        ids = vocabulary.tokenizer.encode(f"{text}{END}{END}\n{text}").ids
        deltas = answered(vocabulary, vocabulary.tokenizer.encode("in").ids, ids, stops=stops)
        raw = b"".join(map(vocabulary.spelling.spelt, ids)).decode()
        marked, stops = raw.replace(END, "\ue000"), [stop.replace(END, "\ue000") for stop in stops]
        ends = [(marked.find(stop) + len(stop), marked.find(stop)) for stop in stops if stop in marked]
        expected = marked[: min(ends)[1]] if ends else marked
        assert text_of(deltas) == expected.replace("\ue000", "")
        assert deltas[-1].finish_reason == ("stop" if ends else "length")

    def test_a_special_token_adds_nothing(self, vocabulary):
        end = vocabulary.tokenizer.token_to_id(END)
        the = vocabulary.tokenizer.encode("the").ids[-1]
        (first, special, last) = tokens_of(answered(vocabulary, [the], [the, end, the]))
        assert special.token.name == END and special.token.spelt == b""
        assert (first.offset, special.offset, last.offset) == (0, 3, 3)

    def test_a_prompt_that_ends_within_a_character(self):
        vocabulary = VOCABULARIES["byte level"]
        ids = vocabulary.tokenizer.encode("日本").ids
        deltas = answered(vocabulary, ids[:2], ids[2:])
        assert text_of(deltas) == "日本" and [one.offset for one in tokens_of(deltas)] == [0, 1, 1, 1]

    def test_special_tokens_in_a_prompt(self, vocabulary):
        text = f"the{END}in"
        ids = vocabulary.tokenizer.encode(text).ids
        deltas = answered(vocabulary, ids, [ids[-1]], echo=text)
        places = {one.token.name: one.offset for one in tokens_of(deltas)}
        assert places[END] == 3 and tokens_of(deltas)[-1].offset == len(text)
        unwritten = [vocabulary.tokenizer.token_to_id(END), *vocabulary.tokenizer.encode("the").ids]
        assert tokens_of(answered(vocabulary, unwritten, [ids[-1]], echo="the"))[0].offset == 0


class TestLikeliest:
    @pytest.mark.parametrize("kind", VOCABULARIES)
    def test_are_as_many_as_asked_for_and_told_apart(self, kind):
        vocabulary = VOCABULARIES[kind]
        ids = range(vocabulary.size)
        token_logprob = TokenLogprob(-1.0, tuple((i, -float(i)) for i in ids))
        one = answer_token(vocabulary.spelling, 5, 0, token_logprob)
        (top,) = as_completion([one])["top_logprobs"]
        assert len(top) == vocabulary.size and list(top.values()) == [-float(i) for i in ids]
        entries = as_chat([one])["content"][0]["top_logprobs"]
        assert len(entries) == vocabulary.size and len({bytes(entry["bytes"]) for entry in entries}) > 256
        assert len({entry["token"] for entry in entries}) == vocabulary.size

    def test_a_part_of_a_character_is_named_by_its_bytes(self):
        spelling = VOCABULARIES["byte level"].spelling
        ids = VOCABULARIES["byte level"].tokenizer.encode("日").ids
        assert spelling.names(ids) == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]

    def test_what_is_impossible_is_a_number_and_what_is_none_no_json(self):
        spelling = VOCABULARIES["byte level"].spelling
        one = answer_token(spelling, 257, 0, TokenLogprob(float("-inf"), ((258, float("-inf")),)))
        assert json.loads(event(as_chat([one]))[6:])["content"][0]["logprob"] == -9999.0
        with pytest.raises(ValueError, match="not JSON compliant"):
            event(as_chat([answer_token(spelling, 257, 0, TokenLogprob(float("nan"), ()))]))


@pytest.mark.assets
class TestSmolLM:
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
    @given(TEXTS, TEXTS)
    @example("Hi 😀 naïve 日本", "日本語の文章です👨\u200d👩\u200d👧")
    def test_bytes_and_places_of_the_real_tokenizer(self, smollm, before, text):
        known = [smollm.tokenizer.decode(smollm.tokenizer.encode(one).ids) == one for one in (before, text)]
        if not text or before.endswith("\ufffd") or not all(known):  # its vocabulary lacks some bytes
            return
        prompt, ids = smollm.tokenizer.encode(f"<|im_start|>{before}").ids, smollm.tokenizer.encode(text).ids
        deltas = answered(smollm, prompt, ids, echo=f"<|im_start|>{before}")
        shown, tokens = text_of(deltas), tokens_of(deltas)
        assert shown == f"<|im_start|>{before}{text}"
        spelt = [smollm.spelling.spelt(i) for i in (*prompt, *ids)]
        assert [one.offset for one in tokens] == expected_places(shown, spelt)
        assert b"".join(one.token.spelt for one in tokens[len(prompt) :]) == text.encode()
