"""Splits that share no passage, windows, and the pinned sets."""

from __future__ import annotations

import gzip
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.assets import corpora
from firsttoken.assets.corpora import (
    SPLITS,
    boolq_prompts,
    load_qa,
    running_text,
    sciq,
    token_windows,
    triviaqa,
)
from firsttoken.assets.qa_files import arrow_rows
from firsttoken.study import paths
from firsttoken.study.errors import AssetError, CorpusError


class Bytes:
    """A tokenizer of bytes, end of text 256; ``head`` goes before every text, as Llama's tokenizer has it."""

    eos_token_id = 256

    def __init__(self, head: tuple[int, ...] = ()) -> None:
        self.head = list(head)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        return {"input_ids": (self.head if add_special_tokens else []) + list(text.encode())}


def squad_file(path, questions: int, passages: int | None = None):
    """A SQuAD file whose questions are spread over the passages."""
    count = passages or questions
    paragraphs = [
        {
            "context": f"passage {number}",
            "qas": [
                {"id": f"{path.stem}-{i}", "question": f"question {i}?", "answers": [{"text": "passage"}]}
                for i in range(number, questions, count)
            ],
        }
        for number in range(count)
    ]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


def test_windows_join_texts_with_the_end_token_and_read_no_more_than_needed():
    def texts():
        yield from ("abc", "defgh")
        raise AssertionError("nine tokens were enough")

    windows = token_windows(texts(), Bytes(), length=3, count=3)
    assert windows.tolist() == [[97, 98, 99], [256, 100, 101], [102, 103, 104]]


def test_every_window_begins_with_the_tokenizers_first_token():
    windows = token_windows(["abc", "de"], Bytes(head=(257,)), length=3, count=3)
    assert windows.tolist() == [[257, 97, 98], [257, 99, 256], [257, 100, 101]]


def test_too_little_text_names_both_numbers():
    with pytest.raises(CorpusError, match=r"has 8 tokens, 3 windows of 3 need 9"):
        token_windows(["abc", "def"], Bytes(), length=3, count=3)
    with pytest.raises(CorpusError, match="at least 1"):
        token_windows(["abc"], Bytes(), length=0, count=3)


@given(st.text(min_size=1))
def test_a_split_is_decided_by_the_words_of_the_passage_alone(passage):
    def part(text, question):
        return corpora._part(corpora.QAItem("i", text, question, ("a",)), 0.6, 0.68)

    assert 0 <= corpora._unit(passage) < 1
    assert part(passage, "one?") == part(f"  {passage}\n", "two?")


def test_a_file_is_cut_in_three_without_a_shared_passage(tmp_path):
    path = squad_file(tmp_path / "mine.json", questions=600, passages=200)
    parts = {split: load_qa(str(path), split) for split in SPLITS}
    assert sum(len(items) for items in parts.values()) == 600
    passages = [{item.passage for item in items} for items in parts.values()]
    assert sum(map(len, passages)) == len(set.union(*passages)) == 200
    assert [round(len(items) / 600, 1) for items in parts.values()] == pytest.approx([0.6, 0.1, 0.3], abs=0.11)
    assert load_qa(str(path), "train") == parts["train"], "the order is fixed"


def test_a_folder_keeps_its_train_file_and_cuts_its_dev_file(tmp_path):
    squad_file(tmp_path / "train-v1.1.json", questions=20)
    squad_file(tmp_path / "dev-v1.1.json", questions=100)
    parts = {split: load_qa(str(tmp_path), split) for split in SPLITS}
    assert len(parts["train"]) == 20
    assert len(parts["validation"]) + len(parts["test"]) == 100
    assert len(parts["validation"]) < len(parts["test"])
    squad_file(tmp_path / "train-v2.0.json", questions=20)
    with pytest.raises(CorpusError, match=r"exactly one \*train\*.json, it holds 2"):
        load_qa(str(tmp_path), "train")


def test_unknown_sources_and_splits(tmp_path):
    with pytest.raises(CorpusError, match="no questions called 'hotpot'; known: sciq"):
        load_qa("hotpot", "train")
    with pytest.raises(CorpusError, match="no split is called 'dev'; known: train, validation, test"):
        load_qa("sciq", "dev")
    for pinned in (sciq, boolq_prompts, running_text):
        with pytest.raises(CorpusError, match="no split is called"):
            pinned("dev")


def test_the_hub_is_read_with_its_own_split_names(monkeypatch):
    import datasets

    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        answer = {"value": "Paris", "aliases": ["City of Light", "Paris"]}
        return [{"question_id": str(i), "question": f"capital {i}?", "answer": answer} for i in range(50)]

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = "hub:mandarjoshi/trivia_qa:rc.nocontext"
    parts = {split: load_qa(source, split) for split in SPLITS}
    assert [split for _, _, split in asked] == ["train", "validation", "validation"]
    assert asked[0][:2] == ("mandarjoshi/trivia_qa", "rc.nocontext")
    assert len(parts["train"]) == len(parts["validation"]) + len(parts["test"]) == 50
    assert parts["train"][0].answers == ("Paris", "City of Light")


@pytest.mark.parametrize("name", ["../..", "/etc", "", ".", "a/b/c", "x" * 300])
def test_a_folder_is_no_data_set_of_the_hub(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for asked in (name, "here"):
        with pytest.raises(CorpusError, match="is no name of a data set on the Hub"):
            load_qa(f"hub:{asked}", "train")


def test_rows_are_kept_as_json_and_read_from_there(tiny_arrow):
    assert arrow_rows("tiny.arrow") == [{"text": "one"}, {"text": "two"}]
    asset, (kept,) = paths.CACHE / "assets" / "tiny.arrow", (paths.CACHE / "rows").iterdir()
    arrow, content = asset.read_bytes(), kept.read_bytes()
    asset.unlink()
    assert arrow_rows("tiny.arrow") == [{"text": "one"}, {"text": "two"}]
    for damaged in (
        b"",
        content[:20],
        content[:-10] + bytes([content[-10] ^ 1]) + content[-9:],
        gzip.compress(b"[NaN]\n"),
    ):
        kept.write_bytes(damaged)
        with pytest.raises(AssetError, match="is not in the cache"):
            arrow_rows("tiny.arrow")
        asset.write_bytes(arrow)
        assert arrow_rows("tiny.arrow") == [{"text": "one"}, {"text": "two"}], "a damaged copy is made again"
        asset.unlink()


def test_a_truncated_arrow_file(tiny_arrow, lock_with):
    path = paths.CACHE / "assets" / "tiny.arrow"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(AssetError, match=r"tiny.arrow is damaged"):
        arrow_rows("tiny.arrow")
    tiny_arrow()  # pinned as it is now: the reader itself must notice
    with pytest.raises(CorpusError, match=r"tiny.arrow: .*; run `firsttoken fetch`"):
        arrow_rows("tiny.arrow")
    assert not (paths.CACHE / "rows").exists()


@pytest.fixture
def tiny_arrow(lock_with):
    """An Arrow stream of two rows in the cache, pinned; call it to pin what the file holds now."""
    import pyarrow as pa

    path = paths.CACHE / "assets" / "tiny.arrow"
    path.parent.mkdir(parents=True)
    table = pa.table({"text": ["one", "two"]})
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)

    def pin() -> None:
        content = path.read_bytes()
        member = {"path": "tiny.arrow", "saved_as": "tiny.arrow", "bytes": len(content)}
        member["sha256"] = hashlib.sha256(content).hexdigest()
        texts = dict.fromkeys(("package", "version", "file", "licence"), "-") | {"sha256": "0" * 64}
        lock_with({"name": "tiny", "bytes": 1, "members": [member], **texts})

    pin()
    return pin


@pytest.mark.assets
def test_sciq_is_825_rows_in_three_fixed_parts():
    parts = {split: sciq(split) for split in SPLITS}
    assert {split: len(items) for split, items in parts.items()} == {"train": 511, "validation": 55, "test": 259}
    everything = [item for items in parts.values() for item in items]
    assert len({item.id for item in everything}) == len({item.passage for item in everything}) == 825
    for item in everything:
        assert item.answers[0].casefold() in item.passage.casefold()
        assert len(item.choices) == 4
        assert item.choices[item.answer_index] == item.answers[0]
    # results and adapters in data/ were made with exactly this order
    digest = hashlib.sha256(" ".join(item.id for item in everything).encode()).hexdigest()
    assert digest.startswith("c62f285770be52e3")


@pytest.mark.assets
def test_triviaqa_has_all_aliases_the_canonical_answer_first():
    items = triviaqa()
    assert len(items) == 7993
    assert all(item.passage == "" and item.answers and len(set(item.answers)) == len(item.answers) for item in items)
    assert [len(load_qa("triviaqa", split)) for split in SPLITS] == [4827, 614, 2552]


@pytest.mark.assets
def test_running_text_shares_no_passage_between_splits():
    parts = {split: running_text(split) for split in SPLITS}
    assert {split: len(texts) for split, texts in parts.items()} == {"train": 7200, "validation": 1397, "test": 1314}
    words = [{" ".join(text.casefold().split()) for text in texts} for texts in parts.values()]
    assert sum(map(len, words)) == len(set.union(*words))
    # made now or kept from before; results in data/ were made with exactly this order
    digest = hashlib.sha256(json.dumps([boolq_prompts(split) for split in SPLITS]).encode()).hexdigest()
    assert digest.startswith("72eaa4e9bb40c69b")
    passage, question = boolq_prompts("train")[0]
    assert passage and "Question:" not in passage and question.endswith("?") and "Answer:" not in question
