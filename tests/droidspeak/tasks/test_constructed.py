"""Every constructed item can be answered from its prefix, in one way only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from firsttoken.assets.corpora import SPLITS
from firsttoken.study.errors import CorpusError
from firsttoken_studies.droidspeak.constructed_tasks import TASKS, build
from firsttoken_studies.droidspeak.reuse_items import TaskItem

pytestmark = pytest.mark.usefixtures("own_passages")


def parts(item: TaskItem) -> tuple[str, list[str]]:
    """The head and the passages of a prefix."""
    assert item.prefix.endswith("\n")
    head, *passages = item.prefix[:-1].split("\n\n")
    return head, passages


def clue_of(item: TaskItem) -> str:
    """What tells the passage that is sought from the others."""
    return parts(item)[0].removeprefix("Find: ") if item.task == "copy" else item.answers[0]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(3))
def test_one_passage_and_no_other_holds_the_answer(task, seed, tokenizer):
    for item in build(task, "train", tokenizer, 400, 15, seed):
        _, passages = parts(item)
        assert sum(clue_of(item).casefold() in passage.casefold() for passage in passages) == 1
        assert len(passages) == len(set(passages)) > 1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [300, 400, 1500])
def test_prefixes_are_filled_but_never_too_long(task, tokens, tokenizer):
    lengths = [len(tokenizer.encode(item.prefix)) for item in build(task, "train", tokenizer, tokens, 10)]
    assert max(lengths) <= tokens
    assert sum(lengths) / len(lengths) > 0.8 * tokens


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", SPLITS)
def test_passages_are_of_the_split_and_sought_once(task, split, tokenizer, own_passages: Callable[[str], list[str]]):
    known = {" ".join(passage.split()) for passage in own_passages(split)}
    items = build(task, split, tokenizer, 400, 20)
    sought = [next(p for p in parts(i)[1] if clue_of(i).casefold() in p.casefold()) for i in items]
    assert all(set(parts(item)[1]) <= known for item in items)
    assert len(set(sought)) == len({item.id for item in items}) == 20


def test_the_seed_alone_decides(tokenizer):
    first = build("lead", "test", tokenizer, 400, 12, seed=1)
    assert build("lead", "test", tokenizer, 400, 12, seed=1) == first
    assert build("lead", "test", tokenizer, 400, 5, seed=1) == first[:5]
    assert build("lead", "test", tokenizer, 400, 12, seed=2) != first


def test_the_answer_stands_anywhere(tokenizer):
    places = set()
    for item in build("qa", "train", tokenizer, 400, 30):
        _, passages = parts(item)
        (place,) = [i for i, p in enumerate(passages) if clue_of(item).casefold() in p.casefold()]
        places.add("first" if place == 0 else "last" if place == len(passages) - 1 else "between")
    assert places == {"first", "last", "between"}


def test_prompts_have_the_shape_that_the_models_are_tuned_to(tokenizer):
    (qa,), (lead,), (copy,) = (build(task, "train", tokenizer, 400, 1) for task in TASKS)
    assert parts(qa)[0].startswith("Question: which name ") and qa.suffix == "\nAnswer:"
    assert parts(lead)[0].startswith("Topic: is it ") and lead.suffix == "\nSummary:"
    assert any(passage.startswith(lead.answers[0]) for passage in parts(lead)[1])
    shown = parts(copy)[0].removeprefix("Find: ")
    assert len(shown.split()) == 4 and copy.suffix == f"\nSentence: {shown}"
    assert any(f"{shown} {copy.answers[0]}" in passage for passage in parts(copy)[1])


def test_an_initial_ends_no_sentence(tokenizer):
    leads = [item.answers[0] for item in build("lead", "train", tokenizer, 2000, 25)]
    assert any("J. Do." in lead for lead in leads)
    assert not any(lead.endswith(" J.") for lead in leads)


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_scores_in_full(task, tokenizer):
    for item in build(task, "train", tokenizer, 400, 5):
        assert TASKS[task].score(item.answers[0], item.answers) == 1.0
        assert TASKS[task].score("nothing of the kind", item.answers) < 0.6
        assert len(tokenizer.encode(item.target, add_special_tokens=False)) <= TASKS[task].answer_tokens + 2


def test_too_few_items_and_unknown_names(tokenizer):
    there = build("qa", "test", tokenizer, 400, None)
    assert build("qa", "test", tokenizer, 400, len(there)) == there
    refused = f"qa has {len(there)} items of test with a prefix of 400 tokens, 61 are asked for"
    with pytest.raises(CorpusError, match=refused):
        build("qa", "test", tokenizer, 400, 61)
    with pytest.raises(CorpusError, match="qa has 0 items of test with a prefix of 30 tokens"):
        build("qa", "test", tokenizer, 30, 1)
    with pytest.raises(CorpusError, match="no constructed task is called 'sum'; known: qa, lead, copy"):
        build("sum", "test", tokenizer, 400, 1)
