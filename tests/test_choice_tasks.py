"""Rows of the published files as the questions that the evaluation harness asks."""

from __future__ import annotations

import pytest

from firsttoken.assets.lock import pinned
from firsttoken.study.errors import CorpusError
from firsttoken_studies import choice_tasks
from firsttoken_studies.choice_tasks import LIKELIEST, TASKS, ChoiceItem, choice_items

ROWS = {
    "hellaswag": (
        {
            "activity_label": "Baking",
            "ctx_a": "[header] A cake [title] The oven is hot.",
            "ctx_b": "the baker",
            "endings": ["waits [step] a bit.", "runs.", "sings.", "eats."],
            "label": "2",
        },
        ChoiceItem(
            ("Baking: A cake. The oven is hot. The baker",) * 4, ("waits a bit.", "runs.", "sings.", "eats."), 2
        ),
    ),
    "lambada": ({"text": "He saw the", "word": "signs"}, ChoiceItem(("He saw the",) * 2, ("signs", LIKELIEST), 0)),
    "winogrande": (
        {"sentence": "Ann saw Bo, so _ waved.", "option1": "Ann", "option2": "Bo", "answer": "1"},
        ChoiceItem(("Ann saw Bo, so Ann", "Ann saw Bo, so Bo"), ("waved.", "waved."), 0),
    ),
    "arc_easy": (
        {"question": "What is wet?", "choices": {"text": ["fire", "water"], "label": ["1", "2"]}, "answerKey": "2"},
        ChoiceItem(("Question: What is wet?\nAnswer:",) * 2, ("fire", "water"), 1),
    ),
    "sciq": (
        {"support": " Rain is wet.", "question": "What is wet?", "correct_answer": "rain"}
        | {"distractor1": "fire", "distractor2": "sand", "distractor3": "ash"},
        ChoiceItem(("Rain is wet.\nQuestion: What is wet?\nAnswer:",) * 4, ("fire", "sand", "ash", "rain"), 3),
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_row_is_the_question_of_the_harness(task):
    row, item = ROWS[task]
    assert TASKS[task].read(row) == item


@pytest.mark.parametrize("task", TASKS)
def test_the_first_questions_are_the_first_of_more(task, monkeypatch):
    made = [ChoiceItem((f"c{i}",) * 2, ("a", "b"), i % 2) for i in range(20)]
    monkeypatch.setattr(choice_tasks, "arrow_rows", lambda name: made)
    monkeypatch.setattr(choice_tasks, "last_words", lambda: made)
    monkeypatch.setitem(TASKS, task, choice_tasks.ChoiceTask("", TASKS[task].file, 20, lambda row: row, by_length=True))
    few, all_of_them = choice_items(task, 5), choice_items(task, 20)
    assert few == all_of_them[:5]
    assert sorted(item.contexts for item in all_of_them) == sorted(item.contexts for item in made)


@pytest.mark.parametrize(("task", "count"), [("none", 3), ("arc_easy", 0), ("arc_easy", 571)])
def test_what_is_not_there_is_refused_in_one_line(task, count):
    with pytest.raises(CorpusError, match=r"no multiple-choice task|ask for 1 to 570"):
        choice_items(task, count)


def test_every_file_is_pinned():
    assert all(pinned(task.file).bytes > 100_000 for task in TASKS.values() if task.file)
