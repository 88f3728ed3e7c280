"""The readers of standard files: right ones, truncated ones, and others."""

from __future__ import annotations

import json

import pytest

from firsttoken.assets.qa_files import QAItem, read_hub, read_qa
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
    assert read_qa(path) == [QAItem("a", "Ada wrote.", "Who?", ("Ada", "she"))]


def test_triviaqa_puts_the_canonical_answer_first(tmp_path):
    path = write(tmp_path / "unfiltered-web-dev.json", TRIVIA)
    assert read_qa(path) == [QAItem("tc_1", "", "Which city?", ("Paris", "City of Light"))]


def test_missing_and_truncated_files_are_named(tmp_path):
    with pytest.raises(CorpusError, match=r"nowhere.json cannot be read: No such file"):
        read_qa(tmp_path / "nowhere.json")
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(SQUAD)[:-5])
    with pytest.raises(CorpusError, match=r"cut.json: it is truncated or no JSON .*; (give|download)"):
        read_qa(path)


@pytest.mark.parametrize("content", [[], {}, {"data": [{"text": "x"}]}, {"data": 3}, "text", 7])
def test_another_format_is_no_squad(content, tmp_path):
    with pytest.raises(CorpusError, match=r"other.json: .*; give a SQuAD file"):
        read_qa(write(tmp_path / "other.json", content))


def test_a_triviaqa_test_file_has_no_answers(tmp_path):
    content = {"Data": [{"QuestionId": "t", "Question": "Which?"}]}
    with pytest.raises(CorpusError, match=r"Data\[0\]: missing key 'Answer'; give a TriviaQA file"):
        read_qa(write(tmp_path / "test.json", content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p, q: p.update(context=5), r"data\[0\].paragraphs\[0\].context: expected str, not 5"),
        (lambda p, q: q.update(is_impossible="false"), "is_impossible: expected bool, not 'false'"),
        (lambda p, q: q.update(answers="Ada"), "answers: expected .*, not 'Ada'"),
        (lambda p, q: q.update(answers=[{"text": None}]), "text: expected str, not None"),
        (lambda p, q: q.update(id=7), "id: expected str, not 7"),
    ],
)
def test_a_squad_file_of_other_types(change, words, tmp_path):
    content = json.loads(json.dumps(SQUAD))
    paragraph = content["data"][0]["paragraphs"][0]
    change(paragraph, paragraph["qas"][0])
    with pytest.raises(CorpusError, match=words):
        read_qa(write(tmp_path / "other.json", content))


@pytest.mark.parametrize(("key", "value"), [("Aliases", "Paris"), ("Aliases", [["Paris"]]), ("Value", 3)])
def test_a_text_is_no_list_of_its_letters(key, value, tmp_path):
    content = json.loads(json.dumps(TRIVIA))
    content["Data"][0]["Answer"][key] = value
    with pytest.raises(CorpusError, match=rf"Answer.{key}.*: expected"):
        read_qa(write(tmp_path / "other.json", content))


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
