"""LongBench files as they are, and as they are when something is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.study.errors import CorpusError
from firsttoken_studies.droidspeak import longbench
from firsttoken_studies.droidspeak.constructed_tasks import load_items, task_of


def row(dataset: str = "hotpotqa", number: int = 0, **changes: object) -> dict:
    """A line of a LongBench file."""
    context = " ".join(f"fub{number} luna{i}." for i in range(80))
    fields = {"input": f"who is gaz {number}?", "context": context, "answers": ["abe", "the bodu"], "length": 160}
    return fields | {"dataset": dataset, "language": "en", "all_classes": None, "_id": f"id{number}"} | changes


def write(path: Path, *rows: dict | str) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def hotpot(tmp_path: Path) -> str:
    """A file of 100 questions."""
    return write(tmp_path / "hotpotqa.jsonl", *(row(number=n) for n in range(100)))


def test_splits_share_nothing_and_lose_nothing(hotpot, tokenizer):
    parts = {split: load_items(hotpot, split, tokenizer, 300, None) for split in ("train", "validation", "test")}
    sizes = {split: len(items) for split, items in parts.items()}
    assert sum(sizes.values()) == len({item.id for items in parts.values() for item in items}) == 100
    assert sizes["validation"] < sizes["train"] < sizes["test"]
    assert load_items(hotpot, "test", tokenizer, 300, 5) == parts["test"][:5]
    with pytest.raises(CorpusError, match=rf"hotpotqa.jsonl has {sizes['test']} items of test, 101 are asked for"):
        load_items(hotpot, "test", tokenizer, 300, 101)


@pytest.mark.parametrize("name", longbench.TASKS)
def test_every_set_has_a_prompt_and_a_score(name, tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", *(row(f"{name}{'_e' * (n % 2)}", n) for n in range(20)))
    item = load_items(path, "test", tokenizer, 5000, 1)[0]
    (source,) = [r for r in longbench.read(path) if item.id == f"{name}-{r.id}"]
    assert source.context in item.prefix and (source.input in item.prefix) == (name not in ("multi_news", "lcc"))
    assert item.prefix.endswith("\n") and item.suffix.startswith("\n") and item.suffix.endswith(":")
    assert item.answers == ("abe", "the bodu")
    task = task_of(item)
    assert task.score("bodu" if task.metric == "F1" else "the bodu", item.answers) == 1.0
    assert (task.answer_tokens, task.stop) == (512, "") if name == "multi_news" else task.answer_tokens <= 64


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(60, 1500), words=st.lists(st.sampled_from(["luna", "é東", " ", "\n", "x.\n\n"]), max_size=300)
)
def test_a_long_context_loses_its_middle(tmp_path, tokenizer, tokens, words):
    rows = (row(number=n, context=f"first {n} {' '.join(words)} last") for n in range(12))
    item = load_items(write(tmp_path / "rows.jsonl", *rows), "test", tokenizer, tokens, 1)[0]
    assert len(tokenizer.encode(item.prefix)) <= tokens
    assert "?\n\nfirst " in item.prefix and item.prefix.endswith(" last\n")


def test_code_is_scored_by_its_first_line_that_is_no_comment():
    answers = ["    return luna"]
    assert longbench.code_similarity("return luna", answers) == 1.0
    assert longbench.code_similarity("\n# so\n```\n    return luna\nmore", answers) == 1.0
    assert longbench.code_similarity("# return luna", answers) == 0.0
    assert 0 < longbench.code_similarity("return fub", answers) < 1


BAD = {
    "torn": ('{"input": "who', r"rows.jsonl: line 2: it is torn or no JSON .*; give a LongBench"),
    "a list": ("[1]", r"line 2: expected a mapping, not \[1\]"),
    "no question": (row(input=None), r"line 2.input: expected str, not None"),
    "no context": ({k: v for k, v in row().items() if k != "context"}, r"line 2: missing key 'context'"),
    "no id": (row(_id=7), r"line 2._id: expected str, not 7"),
    "no answers": (row(answers=[]), r"line 2.answers: expected at least one"),
    "another set": (row("narrativeqa"), r"line 2: no set called 'narrativeqa' is used here; known: hotpotqa"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named(line, message, tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", row(), line, row())
    with pytest.raises(CorpusError, match=message):
        load_items(path, "test", tokenizer, 300, 1)


def test_bad_bytes_files_names_and_sizes(tmp_path, tokenizer, hotpot):
    (tmp_path / "cut.jsonl").write_bytes(json.dumps(row(), ensure_ascii=False).encode()[:-9] + b"\xe6\x9d")
    with pytest.raises(CorpusError, match=r"cut.jsonl: line 1: it is torn"):
        longbench.read(tmp_path / "cut.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(CorpusError, match=r"empty.jsonl: it is empty"):
        longbench.read(tmp_path / "empty.jsonl")
    with pytest.raises(CorpusError, match=r"none.jsonl cannot be read: No such file"):
        longbench.read(tmp_path / "none.jsonl")
    with pytest.raises(CorpusError, match="no task is called 'hotpotqa'; known: qa, lead, copy, a LongBench"):
        load_items("hotpotqa", "test", tokenizer, 300, 1)
    with pytest.raises(CorpusError, match="no split is called 'dev'; known: train, validation, test"):
        load_items(hotpot, "dev", tokenizer, 300, 1)
    with pytest.raises(CorpusError, match=r"the question of hotpotqa-id\d+ leaves no room in 8 tokens"):
        load_items(hotpot, "test", tokenizer, 8, 1)


def test_constructed_tasks_are_loaded_by_name(own_passages, tokenizer):
    items = load_items("copy", "train", tokenizer, 400, 3)
    assert {item.task for item in items} == {"copy"}
    assert task_of(items[0]).metric == "edit similarity"
