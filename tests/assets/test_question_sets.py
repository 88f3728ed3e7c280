"""The sets of questions of one package, with files of two or three lines written here."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from firsttoken.assets import question_sets
from firsttoken.assets.corpora import load_qa
from firsttoken.assets.qa_files import QAItem, read_qa
from firsttoken.assets.question_sets import SETS, code_problems, last_words, question_set
from firsttoken.study import paths
from firsttoken.study.errors import AssetError, CorpusError

PAPER = {"section_name": ["Data", None], "paragraphs": [["We read.", "All of it."], ["More."]]}
TURNS = [{"question": "Who?", "answer": "Ada"}, {"question": "Where?", "answer": "here"}]
DOCS: dict[str, dict[str, Any]] = {
    "squad": {
        "id": "s1",
        "query": "Title: Ada\nBackground: Ada wrote.\nQuestion: Who wrote?\nAnswer:",
        "answers_text": ["Ada", "Ada ", "she"],
    },
    "coqa": {"id": "c_turn1", "story": "A story.", "question": "Where?", "answers": ["here"], "previous_qa": TURNS},
    "drop": {"query_id": "d1", "passage": "Two towns.", "question": "Which?", "answers": [["A", "B"], ["A"]]},
    "jeopardy": {"index": 3, "query": "Category: ART\nQuestion: This hue\nAnswer:", "answer": "blue"},
    "nq-open": {"index": 4, "question": "who sang", "answers": ["Ada", "Eve"]},
    "gsm8k": {"id": 5, "question": "1 + 1?", "short_answer": "2"},
    "math-algebra": {"index": 6, "problem": "$x=1$?", "answer": "1"},
    "qasper": {
        **{"question_id": "q1", "title": "T", "abstract": "An abstract.", "full_text": PAPER},
        **{"question": "Is it?", "answer": "No"},
    },
    "lambada": {"query": "He saw the", "answers_text": ["signs"]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f(a):\n"},
}
FILES = {*DOCS, *(f"math-{part}" for part in ("counting-and-probability", "geometry", "intermediate-algebra"))}
FILES |= {"math-number-theory", "math-prealgebra", "math-precalculus"}


@pytest.fixture
def kept(lock_with) -> Callable[..., None]:
    """Pins the files of ``DOCS``, or others in their place, and puts them into the cache."""
    lock_with()

    def keep(**others: bytes | list[dict[str, Any]]) -> None:
        question_sets._items.cache_clear()
        folder, pinned = paths.CACHE / "assets" / "questions", []
        folder.mkdir(parents=True, exist_ok=True)
        for name in sorted(FILES):
            content = others.get(name, [DOCS[name]] if name in DOCS else [])
            if isinstance(content, list):
                lines = "".join(json.dumps({"doc": doc, "request": {}}) + "\n" for doc in content)
                content = gzip.compress(lines.encode())
            (folder / f"{name}.jsonl.gz").write_bytes(content)
            pinned.append({"name": f"{name}.jsonl.gz", "sha256": hashlib.sha256(content).hexdigest(), "url": "-"})
            pinned[-1]["bytes"] = len(content)
        entry = {"name": "questions", "source": "a wheel", "licence": "none", "files": pinned}
        (paths.ENV / "brought.yaml").write_text(yaml.safe_dump([entry]))

    yield keep
    question_sets._items.cache_clear()


def test_each_set_is_read(kept) -> None:
    kept()
    assert {name: question_set(name) for name in SETS} == {
        "squad": [QAItem("s1", "Ada wrote.", "Who wrote?", ("Ada", "she"))],
        "coqa": [QAItem("c_turn1", "A story.", "Who?\nAnswer: Ada\nQuestion: Where?", ("here",))],
        "drop": [QAItem("d1", "Two towns.", "Which?", ("A, B", "A"))],
        "jeopardy": [QAItem("jeopardy-3", "", "ART: This hue", ("blue",))],
        "nq-open": [QAItem("nq-open-4", "", "who sang", ("Ada", "Eve"))],
        "gsm8k": [QAItem("gsm8k-5", "", "1 + 1?", ("2",))],
        "math": [QAItem("math-algebra-6", "", "$x=1$?", ("1",))],
        "qasper": [
            QAItem("q1", "T\nAn abstract.\nData\nWe read.\nAll of it.\nMore.", "Is it?", ("No",), ("Yes", "No"), 1)
        ],
    }
    assert last_words() == [{"text": "He saw the", "word": "signs"}]
    assert code_problems() == ["def f(a):\n"]


def test_a_text_without_a_last_word_is_refused_with_its_line(kept) -> None:
    kept(lambada=[DOCS["lambada"], {"query": "He saw the", "answers_text": [" "]}])
    with pytest.raises(CorpusError, match=r"line 2: doc\.answers_text\[0\] is no word"):
        last_words()


def test_the_splits_of_a_set(kept) -> None:
    stories = [DOCS["coqa"] | {"id": f"{n}_turn{turn}", "story": f"Story {n}."} for n in range(40) for turn in (0, 1)]
    kept(coqa=stories, qasper=[DOCS["qasper"]] * 2)
    parts = [load_qa("coqa", split) for split in ("train", "validation", "test")]
    assert sum(map(len, parts)) == 80 and all(len(part) % 2 == 0 for part in parts), "a story is in one split"
    assert not {item.passage for item in parts[0]} & {item.passage for item in parts[2]}
    assert len(load_qa("squad", "test")) == 1
    assert {*load_qa("coqa+squad", "test")} == {*parts[2], *load_qa("squad", "test")}
    with pytest.raises(CorpusError, match=r"no questions called 'coqa\+hotpot'"):
        load_qa("coqa+hotpot", "test")
    with pytest.raises(CorpusError, match="all 1 questions of squad are asked, none are for train; name coqa"):
        load_qa("squad", "train")
    assert len(question_set("qasper")) == 1, "a line for each option"


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("squad", {"answers_text": [" "]}, "the question 's1' has no answer"),
        ("drop", {"answers": []}, "the question 'd1' has no answer"),
        ("jeopardy", {"answer": ""}, "the question 'jeopardy-3' has no answer"),
        ("qasper", {"answer": "Maybe"}, "doc.answer: expected one of Yes, No, not 'Maybe'"),
        ("gsm8k", {"short_answer": 2}, "doc.short_answer: expected str, not 2"),
        ("coqa", {"previous_qa": []}, r"doc.previous_qa\[0\] is missing"),
        ("coqa", {"id": "c"}, "doc.id: expected STORY_turnN, not 'c'"),
        ("nq-open", {"answers": None}, "doc.answers: expected .*, not None"),
    ],
)
def test_a_question_that_cannot_be_asked(kept, name: str, change: dict[str, Any], fault: str) -> None:
    kept(**{name: [DOCS[name], DOCS[name] | change]})
    with pytest.raises(CorpusError, match=rf"^{name}.jsonl.gz: line 2: {fault}; run `firsttoken fetch questions`$"):
        load_qa(name, "test")


def test_a_file_that_is_torn_or_was_not_fetched(kept) -> None:
    kept(drop=gzip.compress(b'{"doc": {"query_id"')[:-9])
    with pytest.raises(CorpusError, match=r"^drop.jsonl.gz: .*; run `firsttoken fetch questions`$"):
        load_qa("drop", "test")
    (paths.CACHE / "assets" / "questions" / "coqa.jsonl.gz").unlink()
    with pytest.raises(
        AssetError, match=r"^questions lacks coqa.jsonl.gz: run `firsttoken fetch questions`, or [^\n]*$"
    ):
        load_qa("drop", "test")


def test_a_file_of_the_readers_with_a_question_without_an_answer(tmp_path: Path) -> None:
    content = {"Data": [{"QuestionId": "t1", "Question": "Which?", "Answer": {"Value": "", "Aliases": []}}]}
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(content))
    with pytest.raises(
        CorpusError, match=r"^[^\n]*dev.json: the question 't1' has no answer; give a TriviaQA file[^\n]*$"
    ):
        read_qa(path)


@pytest.mark.assets
def test_the_pinned_sets_hold_what_the_page_says() -> None:
    if not (paths.CACHE / "assets" / "questions").is_dir():
        pytest.skip("`firsttoken fetch questions` brings them")
    sizes = {"squad": 1000, "coqa": 7983, "drop": 1000, "jeopardy": 2116, "nq-open": 1000, "gsm8k": 1319}
    assert {name: len(question_set(name)) for name in SETS} == sizes | {"math": 5000, "qasper": 319}
    assert len(last_words()) == 5153
