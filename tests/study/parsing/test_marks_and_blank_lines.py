"""A byte order mark before a text and lines with nothing on them are nothing, in every reader; so is a null turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firsttoken.sarathi.policy import SCHEDULER
from firsttoken.simulation.workload.conversations import first_pairs
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.json_text import json_lines, parse_json
from firsttoken.study.parsing.yaml_text import parse_yaml
from firsttoken.study.policy_file import PolicyFile
from firsttoken_studies.droidspeak.longbench import read

MARK = b"\xef\xbb\xbf"
ROW = {"input": "q?", "context": "c", "answers": ["a"], "dataset": "hotpotqa", "_id": "x"}


def test_json_and_yaml_may_begin_with_a_mark() -> None:
    assert parse_json(MARK + b'{"a": 1}') == parse_json("\ufeff" + '{"a": 1}') == {"a": 1}
    assert parse_yaml(MARK + b"a: 1\r\n") == {"a": 1}
    assert list(json_lines(MARK + b"1\r\n\r\n  \r\n2\n\n")) == [(1, 1), (4, 2)]


@pytest.mark.parametrize("text", ["{0}\n{0}\n\n", "\n{0}\n \n{0}", "{0}\r\n\r\n{0}\r\n\r\n"])
@pytest.mark.parametrize("mark", [b"", MARK])
def test_longbench_files_with_blank_lines(tmp_path: Path, text: str, mark: bytes) -> None:
    path = tmp_path / "hotpotqa.jsonl"
    path.write_bytes(mark + text.format(json.dumps(ROW)).encode())
    assert [row.id for row in read(path)] == ["x", "x"]


@pytest.mark.parametrize("odd", [None, {"from": "gpt", "value": None}, {"from": "gpt"}, "text"])
def test_a_conversation_with_an_odd_turn_is_passed_by(tmp_path: Path, odd: object) -> None:
    asked, told = {"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer"}
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": [asked, odd]}, {"conversations": [asked, told]}]))
    with pytest.warns(UserWarning, match="1 records are no conversation .* passed by, first record 1"):
        assert first_pairs(path) == [("a question", "an answer")]


@pytest.mark.parametrize("end", ["import sys\nsys.exit(7)", "raise SystemExit", "def f(): f()\nf()"])
def test_a_policy_file_does_not_end_the_program(tmp_path: Path, end: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(end)
    with pytest.raises(ProfileError, match=r"mine.py, line \d: (SystemExit|RecursionError).*mend the policy"):
        PolicyFile.read(path, SCHEDULER)
