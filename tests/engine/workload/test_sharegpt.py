"""Conversations as requests: the torn file, the pairs, the kept token ids, and the report's mix of short and long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.assets.lock import asset_path, file_sha256, pinned
from firsttoken.engine.workload_items import Item
from firsttoken.simulation.workload import conversations as kept
from firsttoken.simulation.workload.conversations import conversations, first_pairs, pinned_tokenizer, read_records
from firsttoken.simulation.workload.sharegpt import threshold_mix
from firsttoken.study import paths
from firsttoken.study.errors import AssetError, CorpusError, ModelError, RequestError

HUMAN, MODEL = "human", "gpt"


@contextmanager
def pinned_file(path: Path) -> Iterator[None]:
    """Inside the block ``path`` stands for the pinned file."""

    def entry(name: str) -> Any:
        return SimpleNamespace(sha256=file_sha256(path)) if name == "sharegpt" else pinned(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "pinned", entry)
        patch.setattr(kept, "asset_path", lambda name: path)
        yield


def conversations_of(tokenizer: Any, path: Path) -> kept.Conversations:
    with pinned_file(path):
        return conversations(tokenizer)


RECORDS = [
    {"id": "a", "conversations": [{"from": HUMAN, "value": 'q "1" \\ é 漢'}, {"from": MODEL, "value": "r\n1"}]},
    {"id": "b", "n": [1, -2.5e3, True, False, None, {"x": []}], "conversations": []},
    {"id": "c", "conversations": [{"from": HUMAN, "value": "], [{"}]},
]


def talk(question: str, answer: str) -> list[tuple[str, str]]:
    return [(HUMAN, question), (MODEL, answer)]


@given(ascii=st.booleans(), indent=st.sampled_from([None, 2]), data=st.data())
def test_a_file_that_breaks_off_anywhere_gives_its_whole_records(tmp_path_factory, ascii, indent, data):
    text = json.dumps(RECORDS, ensure_ascii=ascii, indent=indent).encode()
    cut = data.draw(st.integers(0, len(text)))
    path = tmp_path_factory.mktemp("cut") / "cut.json"
    path.write_bytes(text[:cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "_CHUNK", data.draw(st.integers(1, len(text))))
        found = list(read_records(path))
    assert found == RECORDS[: len(found)]
    whole = [text.index(b'"b"'), text.index(b'"c"'), len(text)]
    assert len(found) >= sum(cut >= end for end in whole), "no record is lost that the next one follows"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": 1}', "is no JSON list of conversations; use a ShareGPT .json file"),
        (
            '[{"conversations": []}, oops, {"id": 2}, {"id": 3}]',
            r"there is no JSON after record 1 \(Expecting value\); download",
        ),
        ('[{"conversations": []}, {"id": 2 "name": 3}, {"id": 3}]', "there is no JSON after record 1 .*delimiter"),
        (b'[{"id": "\xff\xfe"}]', "is not UTF-8 text; unpack it if it is compressed"),
        ("", "has no question that is answered; it is cut too early or of another format"),
        ('[{"id": 1, "conversations": [{"from": "human", "val', "has no question that is answered"),
        ('[{"id": 1, "conversations": [{"role": "user"}]}]', "record 1: it is no conversation of turns with `from`"),
        ('[{"id": 1, "conversations": [{"from": "human", "value": 1}, {"from": "gpt", "value": 2}]}]', "record 1: it"),
        ("[1, 2]", "record 1: it is no conversation"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path, tokenizer, text, words):
    path = tmp_path / "bad.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CorpusError, match=words) as caught:
        conversations_of(tokenizer, path)
    assert "bad.json" in str(caught.value) and "\n" not in str(caught.value)
    assert not (paths.CACHE / "conversations").exists(), "nothing half-made is kept"


def test_a_file_that_is_not_there(tmp_path, tokenizer):
    with pytest.raises(CorpusError, match=r"cannot read .*none.json: No such file"):
        first_pairs(tmp_path / "none.json")
    with pytest.raises(AssetError, match=r"sharegpt-v3.json is not in the cache; run `firsttoken fetch`"):
        conversations(tokenizer)


def test_the_pair_is_the_first_question_that_is_answered_at_once(write_sharegpt):
    path = write_sharegpt(
        [("system", "be kind"), (HUMAN, "q1"), (MODEL, "r1"), (HUMAN, "later"), (MODEL, "later")],
        [(MODEL, "the end of an answer"), (HUMAN, "q2"), (MODEL, "r2")],
        [(HUMAN, "not answered"), (HUMAN, "q3"), (MODEL, "half a pair: \ud83d")],
        [(MODEL, "alone")],
        [],
    )
    assert sorted(first_pairs(path)) == [("q1", "r1"), ("q2", "r2"), ("q3", "half a pair: ?")]


def test_the_order_is_fixed_and_not_the_files(write_sharegpt):
    talks = [talk(f"question {i}", f"answer {i}") for i in range(50)]
    first = first_pairs(write_sharegpt(*talks))
    assert first == first_pairs(write_sharegpt(*reversed(talks))) != [(q, a) for (_, q), (_, a) in talks]


def test_token_ids_are_the_tokenizers_own(write_sharegpt, tokenizer):
    path = write_sharegpt(talk("question", "an answer"), talk("to", "short"), talk("too short", "too"))
    tokenizer(["x"], padding="max_length", truncation=True, max_length=5)  # leaves both switched on in its backend
    pool = conversations_of(tokenizer, path)
    (item,) = [pool.item(index) for index in range(len(pool))]
    ids = tokenizer("question")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert item == Item(0.0, 9, 9, tuple(ids))
    assert pool.prompt_tokens.tolist() == [9]


def test_what_is_made_is_kept_and_made_again_when_it_is_damaged(write_sharegpt, tokenizer, monkeypatch):
    path = write_sharegpt(talk("question one", "answer"), talk("question two", "answer"))
    made = conversations_of(tokenizer, path)
    (file,) = (paths.CACHE / "conversations").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_tokenised", lambda *_: pytest.fail("it was kept"))
        again = conversations_of(tokenizer, path)
    assert all(np.array_equal(a, b) for a, b in zip(vars(made).values(), vars(again).values(), strict=True))
    whole = file.read_bytes()
    for damaged in (whole[:-40], b"", whole.replace(bytes(made.ids[3:6].data), bytes(12))):
        assert damaged != whole
        file.write_bytes(damaged)
        assert np.array_equal(conversations_of(tokenizer, path).ids, made.ids)
        assert file.read_bytes() == whole
    write_sharegpt(talk("another question", "answer"))
    assert len(conversations_of(tokenizer, path)) == 1, "another file is another entry"


def test_tokenizers_and_texts_that_cannot_be_used(write_sharegpt, tokenizer):
    with pytest.raises(ModelError, match=r"object is no fast tokenizer; load one with a tokenizer.json"):
        conversations(object())
    with pytest.raises(CorpusError, match="no question and answer of at least 4 tokens; use a longer file"):
        conversations_of(tokenizer, write_sharegpt(talk("question", "no")))


def test_a_cache_that_cannot_be_written(write_sharegpt, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(paths, "CACHE", tmp_path / "file")
    with pytest.raises(CorpusError, match=r"cannot write .*Not a directory; set FIRSTTOKEN_CACHE to another folder"):
        conversations_of(tokenizer, write_sharegpt(talk("question", "answer")))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A file of conversations of 10 to 210 tokens, the prompt a quarter of each or so, which begins with the number."""
    path = tmp_path_factory.mktemp("many") / "many.json"
    talks = [talk(f"{n:03d}{'q' * (n // 4)}", "a" * (n - n // 4 - 4)) for n in range(10, 211)]
    turns = [[{"from": who, "value": what} for who, what in pair] for pair in talks]
    path.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    return path


def mix(tokenizer, many, **changes):
    sizes = {"short": 20, "long": 20, "threshold": 100, "total": (16, 200)}
    with pinned_file(many):
        return threshold_mix(tokenizer, **sizes | changes)


def test_the_mix_is_half_short_half_long_and_follows_the_seed(tokenizer, many):
    items = mix(tokenizer, many)
    totals = [item.total_tokens for item in items]
    assert sum(16 <= total <= 100 for total in totals) == sum(100 < total <= 200 for total in totals) == 20
    assert len({item.prompt for item in items}) == 40, "none is drawn twice"
    assert {item.arrival_s for item in items} == {0.0}
    assert sum(total <= 100 for total in totals[:20]) not in (0, 20), "short and long come mixed"
    assert items == mix(tokenizer, many) != mix(tokenizer, many, seed=1)
    for item in items:
        assert item.prompt[0] == tokenizer.bos_token_id
        assert int(tokenizer.decode(item.prompt[1:4])) == item.total_tokens


@given(scale=st.floats(0.05, 1), seed=st.integers(0, 9))
def test_scaled_down_it_is_the_same_conversations_in_the_same_classes(tokenizer, many, scale, seed):
    full = mix(tokenizer, many, seed=seed)
    small = mix(tokenizer, many, seed=seed, scale=scale)
    for large, item in zip(full, small, strict=True):
        assert 16 * scale <= item.total_tokens <= 200 * scale or item.total_tokens == 2
        assert (item.total_tokens <= 100 * scale) == (large.total_tokens <= 100)
        assert abs(item.total_tokens - large.total_tokens * scale) <= 1.5
        assert abs(item.prompt_tokens - large.prompt_tokens * scale) <= 1.5
        assert item.prompt == large.prompt[: item.prompt_tokens]
    assert mix(tokenizer, many, seed=seed, scale=1.0) == full


def test_mixes_that_cannot_be_made(tokenizer, many):
    with pytest.raises(CorpusError, match="85 conversations have 16 to 100 tokens and 86 are asked for; ask for fewer"):
        mix(tokenizer, many, short=86)
    with pytest.raises(RequestError, match="no mix has -1 short and 20 long requests; ask for at least one"):
        mix(tokenizer, many, short=-1)
    with pytest.raises(RequestError, match="no mix has 0 short and 0 long"):
        mix(tokenizer, many, short=0, long=0)
    for threshold in (15, 200):
        with pytest.raises(RequestError, match=f"a threshold of {threshold} tokens does not part totals of 16 to 200"):
            mix(tokenizer, many, threshold=threshold)
    for scale in (0, 1.5, float("nan")):
        with pytest.raises(RequestError, match=r"lengths cannot be scaled by .*; scale is above 0 and at most 1"):
            mix(tokenizer, many, scale=scale)
    with pytest.raises(RequestError, match=r"scaled by 0.005, no length is left for totals of 16 to 100 tokens"):
        mix(tokenizer, many, scale=0.005)


@pytest.mark.assets
def test_the_pinned_file_has_17671_whole_records_of_which_17379_are_questions_and_answers():
    path = asset_path("sharegpt")
    assert sum(1 for _ in read_records(path)) == 17_671
    assert len(first_pairs(path)) == 17_379


@pytest.mark.assets
def test_the_reports_mix_with_the_pinned_models_tokenizer(tmp_path, monkeypatch):
    head = tmp_path / "head.json"  # the whole file takes 20 s
    with asset_path("sharegpt").open("rb") as file:
        head.write_bytes(file.read(8_000_000))
    (tmp_path / "cache").mkdir()
    for name in ("assets", "models"):
        (tmp_path / "cache" / name).symlink_to(paths.CACHE / name)
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    tokenizer = pinned_tokenizer()
    with pinned_file(head):
        items = threshold_mix(tokenizer, short=40, long=40, seed=4)
    assert sum(128 <= item.total_tokens <= 1024 for item in items) == 40
    assert sum(1024 < item.total_tokens <= 2048 for item in items) == 40
    pairs = first_pairs(head)
    for item in items:
        text = tokenizer.decode(item.prompt, clean_up_tokenization_spaces=False)
        assert item.prompt == tuple(tokenizer(text)["input_ids"])
        # some questions ("continue") were asked and answered more than once
        assert item.output_tokens in [len(tokenizer(answer)["input_ids"]) for asked, answer in pairs if asked == text]
    bare = tuple(replace(item, prompt=()) for item in items)
    with pinned_file(head):
        assert threshold_mix(None, short=40, long=40, seed=4) == bare
        for name in ("assets", "models"):
            (tmp_path / "cache" / name).unlink()
        assert threshold_mix(None, short=40, long=40, seed=4) == bare, "the kept lengths are enough"
