"""What a client reads of tokens that come one by one, against what all of them are."""

from __future__ import annotations

import codecs
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from firsttoken.study.errors import ModelError, RequestError
from firsttoken_serve.chat.spelling import Spelling
from firsttoken_serve.chat.text import StopFilter, TextStream, Vocabulary, read_vocabulary

same_fixture = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.one_of(st.text(), st.text(alphabet="the in 日本é😀\ufffd\u200d👨👩"))


def streamed(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(i) for i in ids), stream.finish()]


class TestTextStream:
    @same_fixture
    @given(texts)
    def test_any_text_comes_out_as_it_was_and_never_in_half_characters(self, any_tokenizer, text):
        ids = any_tokenizer.encode(text).ids
        deltas = streamed(any_tokenizer, ids)
        assert "".join(deltas) == any_tokenizer.decode(ids)
        assert "".join(deltas) == text.replace("▁", " ") or any_tokenizer.normalizer
        assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)

    @same_fixture
    @given(texts, st.data())
    def test_goes_on_where_the_prompt_ends(self, any_tokenizer, text, data):
        ids = any_tokenizer.encode(text).ids
        cut = data.draw(st.integers(0, len(ids)))
        raw = b"".join(map(Spelling(any_tokenizer).spelt, ids[:cut]))
        before = codecs.getincrementaldecoder("utf-8")().decode(raw)  # the prompt may end inside a character
        before = before.removeprefix(" ") if any_tokenizer.normalizer else before
        assert before + "".join(streamed(any_tokenizer, ids[cut:], ids[:cut])) == any_tokenizer.decode(ids)

    @same_fixture
    @given(st.lists(st.integers(0, 259)))
    def test_bytes_that_are_no_text_come_out_as_if_read_at_once(self, tokenizers, ids):
        tokenizer = tokenizers["byte level"]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)

    @same_fixture
    @given(st.lists(st.one_of(st.integers(128, 255), st.sampled_from("the in"))))
    def test_bytes_that_are_no_text_lose_nothing_that_comes_after_them(self, tokenizers, tokens):
        """A byte that fits no character makes a decoder of single bytes read those before it anew."""
        tokenizer = tokenizers["byte fallback"]
        names = [f"<0x{one:02X}>" if isinstance(one, int) else one.replace(" ", "▁") for one in tokens]
        ids = [tokenizer.token_to_id(name) for name in names]
        assume(None not in ids)
        said = "".join(streamed(tokenizer, ids))
        letters = [one for one in tokens if isinstance(one, str)]
        assert [one for one in said if ord(one) < 128 and one != " "] == [one for one in letters if one != " "]
        assert said.count(" ") >= letters.count(" ") - 1  # the first one is dropped

    def test_a_stray_byte_after_a_character_ends_no_text(self, tokenizers):
        tokenizer = tokenizers["byte fallback"]
        ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "日".encode() + b"\xe6"]
        ids += tokenizer.encode("the").ids
        assert "".join(streamed(tokenizer, ids)).split("\ufffd")[0] == "日"
        assert "".join(streamed(tokenizer, ids)).endswith("the")

    def test_a_word_after_the_prompt_keeps_its_space(self, tokenizers):
        tokenizer = tokenizers["byte fallback"]
        first, second = tokenizer.encode("the").ids, tokenizer.encode("inn").ids
        assert tokenizer.decode(second) == "inn"
        assert "".join(streamed(tokenizer, second, first)) == " inn"

    @pytest.mark.parametrize("prompt", ["Hi \ufffd", "\ufffd\ufffd", "the\ufffd ", "\ufffd"])
    def test_what_the_prompt_says_is_not_said_again(self, any_tokenizer, prompt):
        """Neither where it ends in the character that stands for what is none, nor where one more is begun."""
        ids = any_tokenizer.encode(prompt).ids
        assert "".join(streamed(any_tokenizer, any_tokenizer.encode("the").ids[-1:], ids)).strip() == "the"
        letter = Spelling(any_tokenizer)
        parts = [next(i for i in range(260) if letter.spelt(i) == bytes([byte])) for byte in "日".encode()]
        assert "".join(streamed(any_tokenizer, parts[1:], [*ids, parts[0]])) == "日"

    def test_special_tokens_are_not_shown(self, any_tokenizer):
        end = any_tokenizer.token_to_id("<end>")
        ids = any_tokenizer.encode("the").ids
        assert "".join(streamed(any_tokenizer, [end, *ids, end])) == "the"


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the stop that is completed first."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


class TestStopFilter:
    @given(
        st.lists(st.text(alphabet="abc", max_size=4), max_size=8),
        st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    )
    def test_cuts_the_same_wherever_the_pieces_end(self, deltas, stops):
        text, stop = "".join(deltas), StopFilter(stops)
        assert "".join([*(stop.push(delta) for delta in deltas), stop.finish()]) == cut(text, stops)
        assert stop.stopped == any(s in text for s in stops)

    @given(st.lists(st.text(alphabet="ab")), st.text(alphabet="ab", min_size=1))
    def test_holds_back_no_more_than_the_stop_is_long(self, deltas, stop):
        filtered, given_, returned = StopFilter([stop]), 0, 0
        for delta in deltas:
            given_, returned = given_ + len(delta), returned + len(filtered.push(delta))
            assert filtered.stopped or given_ - returned < len(stop)

    def test_a_stop_that_spans_pieces_never_shows(self):
        stop = StopFilter(["\n\n"])
        assert [stop.push(delta) for delta in ("one\n", "two\n", "\n", "three")] == ["one", "\ntwo", "", ""]


class TestVocabulary:
    @pytest.fixture
    def vocabulary(self, tiny: Path) -> Vocabulary:
        return read_vocabulary(tiny, most_tokens=8)

    def test_prompts_are_texts_or_ids(self, vocabulary):
        ids = vocabulary.prompt_ids("the inn")
        assert ids == vocabulary.tokenizer.encode("the inn").ids == vocabulary.prompt_ids(ids)

    @pytest.mark.parametrize(
        "prompt, message",
        [
            ("", "empty"),
            ([], "empty"),
            ("a" * 9, "9 tokens, and the limit is 8"),
            ([1] * 9, "9 tokens, and the limit is 8"),
            ("a" * 41, "41 characters cannot be 8 tokens"),  # the longest token has 5
            ([1, 260], "no token 260, only 0 to 259"),
            ([-1], "no token -1"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, vocabulary, prompt, message):
        with pytest.raises(RequestError, match=message):
            vocabulary.prompt_ids(prompt)

    def test_a_tokenizer_file_that_truncates_and_pads_does_neither_here(self, tiny, tmp_path):
        shutil.copytree(tiny, tmp_path / "odd")
        tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=6)
        tokenizer.save(str(tmp_path / "odd" / "tokenizer.json"))
        assert len(read_vocabulary(tmp_path / "odd", 8).prompt_ids("abcd")) == 4

    def test_a_folder_without_a_whole_tokenizer_is_refused(self, tiny, tmp_path):
        folder = tmp_path / "model"
        shutil.copytree(tiny, folder)
        path = folder / "tokenizer.json"
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ModelError, match=r"tokenizer\.json: it is truncated"):
            read_vocabulary(folder, 8)
        path.unlink()
        with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
            read_vocabulary(folder, 8)
