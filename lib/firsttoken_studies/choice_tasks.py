"""Tasks as the LM Evaluation Harness asks them: HellaSwag, LAMBADA, WinoGrande, ARC-Easy, SciQ.

PETALS states the accuracy of 8-bit weights on the first three (Table 1). The option whose text the model finds
likeliest behind its context is its answer; nothing is generated. The order is a fixed shuffle, of which any beginning
is a fair sample.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from firsttoken.assets.qa_files import arrow_rows
from firsttoken.assets.question_sets import last_words
from firsttoken.study.errors import CorpusError
from firsttoken.study.parsing.schema import unknown

LIKELIEST = "\0"  # a continuation: the tokens that the model finds likeliest where those of the first option stand


@dataclass(frozen=True)
class ChoiceItem:
    """A question: the text of option i is ``continuations[i]`` behind ``contexts[i]``, and option ``answer`` is right.

    The options of HellaSwag share one context; those of WinoGrande share the continuation and differ before it. LAMBADA
    has the last word of a text and ``LIKELIEST``: as likely as that is the word only where greedy decoding gives it.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ChoiceTask:
    """A pinned file ("" for ``last_words``) with its number of questions, and how one of its rows is read.

    ``by_length``: the options differ in length, so that accuracy is stated by likelihood a byte (the harness calls it
    acc_norm).
    """

    title: str
    file: str
    questions: int
    read: Callable[[dict[str, Any]], ChoiceItem]
    by_length: bool


def choice_items(task: str, count: int) -> list[ChoiceItem]:
    """The first ``count`` questions of the validation split of ``task``, in a fixed shuffled order.

    Raises CorpusError for an unknown task or where it has fewer, AssetError when its file is not fetched.
    """
    check_count(task, count)
    rows = arrow_rows(TASKS[task].file) if TASKS[task].file else last_words()
    items = [TASKS[task].read(row) for row in rows]
    return sorted(items, key=_digest)[:count]


def check_count(task: str, count: int) -> None:
    """Raise CorpusError where there is no ``task`` or it has fewer than ``count`` questions."""
    if task not in TASKS:
        raise CorpusError(f"no multiple-choice task {task!r}; {unknown(task, TASKS)}")
    most = TASKS[task].questions
    if not 1 <= count <= most:
        raise CorpusError(f"{task} has {most:,} questions, and {count:,} are asked for; ask for 1 to {most:,}")


def _digest(item: ChoiceItem) -> str:
    return hashlib.sha256("\n".join([*item.contexts, *item.continuations]).encode()).hexdigest()


def _hellaswag(row: dict[str, Any]) -> ChoiceItem:
    context = _plain(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    endings = tuple(_plain(ending) for ending in row["endings"])
    return ChoiceItem((context,) * len(endings), endings, int(row["label"]))


def _plain(text: str) -> str:
    """The text without the marks of WikiHow, of which HellaSwag took a part."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _lambada(row: dict[str, Any]) -> ChoiceItem:
    return ChoiceItem((row["text"],) * 2, (row["word"], LIKELIEST), 0)


def _winogrande(row: dict[str, Any]) -> ChoiceItem:
    before, _, after = row["sentence"].partition("_")
    return ChoiceItem((before + row["option1"], before + row["option2"]), (after.strip(),) * 2, int(row["answer"]) - 1)


def _arc(row: dict[str, Any]) -> ChoiceItem:
    texts, labels = tuple(row["choices"]["text"]), row["choices"]["label"]
    return ChoiceItem((f"Question: {row['question']}\nAnswer:",) * len(texts), texts, labels.index(row["answerKey"]))


def _sciq(row: dict[str, Any]) -> ChoiceItem:
    texts = (*(row[f"distractor{i}"] for i in (1, 2, 3)), row["correct_answer"])
    return ChoiceItem((f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:",) * 4, texts, 3)


TASKS = {
    "hellaswag": ChoiceTask("HellaSwag", "hellaswag-validation.arrow", 10_042, _hellaswag, by_length=True),
    "lambada": ChoiceTask("LAMBADA", "", 5_153, _lambada, by_length=False),
    "winogrande": ChoiceTask("WinoGrande", "winogrande-xl-validation.arrow", 1_267, _winogrande, by_length=False),
    "arc_easy": ChoiceTask("ARC-Easy", "arc-easy-validation.arrow", 570, _arc, by_length=True),
    "sciq": ChoiceTask("SciQ", "sciq-validation.arrow", 1_000, _sciq, by_length=True),
}
