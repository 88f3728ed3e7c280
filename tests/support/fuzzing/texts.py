"""Files of questions that users bring."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from firsttoken.assets.qa_files import read_qa
from firsttoken_studies.droidspeak import longbench
from fuzzing.property import Format, from_json
from fuzzing.studies import sound

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "x",
            "paragraphs": [
                {
                    "context": f"Ada wrote {i}.",
                    "qas": [
                        {"id": f"a{i}", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]},
                        {"id": f"b{i}", "question": "Why?", "answers": [], "is_impossible": True},
                        {"id": f"c{i}", "question": "When?", "answers": [{"text": "x"}], "is_impossible": False},
                    ],
                }
                for i in range(3)
            ],
        }
    ],
}
TRIVIA = {
    "Data": [
        {"QuestionId": f"t{i}", "Question": "Which city?", "Answer": {"Value": "Paris", "Aliases": ["Paname", "Paris"]}}
        for i in range(4)
    ],
    "Domain": "Web",
}
LINES = [
    {
        "_id": f"i{i}",
        "dataset": "hotpotqa",
        "input": "Who?",
        "context": "Some one.",
        "answers": ["one", "two"],
        "all": 1,
    }
    for i in range(5)
]


def questions(folder: Path) -> list[dict[str, Any]]:
    return [asdict(item) for item in read_qa(folder / "qa.json")]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [asdict(row) for row in longbench.read(folder / "hotpotqa.jsonl")]


def legal(intact: list[dict[str, Any]], found: list[dict[str, Any]]) -> bool:
    """Text is data: any words may be asked and answered, but an answer is words, and there is one."""
    texts = [text for item in found for key, value in item.items() for text in _texts(value) if key != "choices"]
    return sound(found) and all(isinstance(text, str) for text in texts) and all(item["answers"] for item in found)


def _texts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [] if isinstance(value, int) else [value]


def shorter_answers(intact: list[dict[str, Any]], found: list[dict[str, Any]]) -> bool:
    """As :func:`legal`; and a text that stands for a list has not become its letters."""
    return legal(intact, found) and not any(item["answers"] == tuple("Paris") for item in found)


FORMATS = (
    Format(
        "squad",
        lambda folder: (folder / "qa.json").write_text(json.dumps(SQUAD)),
        ("qa.json",),
        questions,
        load=from_json,
        legal=legal,
    ),
    Format(
        "triviaqa",
        lambda folder: (folder / "qa.json").write_text(json.dumps(TRIVIA)),
        ("qa.json",),
        questions,
        load=from_json,
        legal=shorter_answers,
    ),
    Format(
        "longbench",
        lambda folder: (folder / "hotpotqa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES)),
        ("hotpotqa.jsonl",),
        lines,
        legal=legal,
    ),
)
