"""The readers of standard files: right ones, truncated ones, and others."""

from __future__ import annotations

import json

import pytest

from firsttoken.assets.qa_files import QAItem, read_hub, read_qa, read_squad, read_triviaqa
from firsttoken.study.errors import CorpusError

ANSWERED = {"id": "a", "question": " Who? ", "answers": [{"text": "Ada"}, {"text": "Ada "}, {"text": "she"}]}
IMPOSSIBLE = {"id": "b", "question": "Why?", "answers": [], "is_impossible": True}
SQUAD = {"version": "v2.0", "data": [{"paragraphs": [{"context": "Ada wrote.", "qas": [ANSWERED, IMPOSSIBLE]}]}]}
TRIVIA = {
    "Data": [
        {
            "QuestionId": "tc_1",
            "Question": "Which city?",
            "Answer": {"Value": "Paris", "Aliases": ["City of Light", "Paris"]},
        }
    ]
}


def write(path, content) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_squad_drops_unanswerable_questions_and_repeated_answers(tmp_path):
    path = write(tmp_path / "dev-v2.0.json", SQUAD)
    assert read_squad(path) == read_qa(path) == [QAItem("a", "Ada wrote.", "Who?", ("Ada", "she"))]


def test_triviaqa_puts_the_canonical_answer_first(tmp_path):
    path = write(tmp_path / "unfiltered-web-dev.json", TRIVIA)
    assert read_triviaqa(path) == read_qa(path) == [QAItem("tc_1", "", "Which city?", ("Paris", "City of Light"))]


@pytest.mark.parametrize("read", [read_squad, read_triviaqa, read_qa])
def test_missing_and_truncated_files_are_named(read, tmp_path):
    with pytest.raises(CorpusError, match=r"cannot read .*nowhere.json: No such file"):
        read(tmp_path / "nowhere.json")
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(SQUAD)[:-5])
    with pytest.raises(CorpusError, match=r"cut.json is truncated or no JSON"):
        read(path)


@pytest.mark.parametrize("content", [[], {}, {"data": [{"text": "x"}]}, {"data": 3}, "text", 7])
def test_another_format_is_no_squad(content, tmp_path):
    with pytest.raises(CorpusError, match=r"other.json is no SQuAD file"):
        read_qa(write(tmp_path / "other.json", content))


def test_a_triviaqa_test_file_has_no_answers(tmp_path):
    content = {"Data": [{"QuestionId": "t", "Question": "Which?"}]}
    with pytest.raises(CorpusError, match=r"is no TriviaQA file .*at fault: 'Answer'"):
        read_qa(write(tmp_path / "test.json", content))


def test_a_file_without_answerable_questions(tmp_path):
    content = {"data": [{"paragraphs": [{"context": "c", "qas": [IMPOSSIBLE]}]}]}
    with pytest.raises(CorpusError, match="holds no answerable question"):
        read_qa(write(tmp_path / "empty.json", content))


def test_the_hub_is_not_there_or_has_other_columns(monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(CorpusError, match=r"rajpurkar/squad \(train\).*Couldn't reach the Hub; a SQuAD"):
        read_hub("rajpurkar/squad", None, "train")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: [{"text": "x"}])
    with pytest.raises(CorpusError, match="neither SQuAD's nor TriviaQA's columns"):
        read_hub("some/set", None, "train")


def test_squad_from_the_hub(monkeypatch):
    import datasets

    row = {"id": "a", "context": "Ada wrote.", "question": "Who?", "answers": {"text": ["Ada"], "answer_start": [0]}}
    unanswerable = {**row, "answers": {"text": [], "answer_start": []}}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: [row, unanswerable])
    assert read_hub("rajpurkar/squad_v2", None, "train") == [QAItem("a", "Ada wrote.", "Who?", ("Ada",))]
