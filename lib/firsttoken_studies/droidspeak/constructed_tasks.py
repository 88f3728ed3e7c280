"""Three tasks constructed from the pinned passages: find an answer, a first sentence, the rest of a sentence.

Each prefix names what is sought and then gives passages, one of which holds it. What is sought comes first, so that a
model can look for it while it reads, and the prefix's KV cache comes to depend on what the model was tuned for. These
stand in for the long-context sets of the paper (DroidSpeak, 5.1), which ``longbench`` reads.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from transformers import PreTrainedTokenizerBase

from firsttoken.assets.corpora import boolq_prompts, load_qa, running_text
from firsttoken.scoring import edit_similarity, rouge_l, token_f1
from firsttoken.study.errors import CorpusError
from firsttoken_studies.droidspeak import longbench
from firsttoken_studies.droidspeak.reuse_items import Task, TaskItem

_ANSWER_TOKENS = 32  # the longest answer that is asked for; the stop comes on top

TASKS = {
    "qa": Task("F1", token_f1, _ANSWER_TOKENS + 1),
    "lead": Task("ROUGE-L", rouge_l, _ANSWER_TOKENS + 1),
    "copy": Task("edit similarity", edit_similarity, _ANSWER_TOKENS + 1),
}

_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)\s+(?=[A-Z\"'(])")  # an initial ends no sentence
_LEAST_LEAD_WORDS = 5
_COPY_WORDS = range(12, 25)
_COPY_SHOWN = 4
_PATIENCE = 100  # passages in a row that do not fit; with more, the few shortest would stand in every prefix


@dataclass(frozen=True)
class _Sought:
    """The passage, question and answer of an item; ``clue`` stands in no other passage of the prefix, so that there is
    one answer."""

    passage: str
    head: str
    suffix: str
    answer: str
    clue: str


def build(
    task: str, split: str, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int | None, seed: int = 0
) -> list[TaskItem]:
    """``count`` (None: all) items of ``task`` ("qa", "lead", "copy"), each about another passage.

    A prefix has at most ``tokens`` tokens. The passage that holds the answer takes at most half of it; others of the
    same split fill it up, in random order. ``seed`` draws order, places and distractors. Raises CorpusError for an
    unknown task or split, and when the split has fewer items that fit.
    """
    if task not in _SOURCES:
        raise CorpusError(f"no constructed task is called {task!r}; known: {', '.join(_SOURCES)}")
    rng = random.Random(f"{task} {split} {seed}")
    passages, sought = _SOURCES[task](split, rng)
    rng.shuffle(passages)
    rng.shuffle(sought)
    pool = _Pool(passages, tokenizer, rng)
    items: list[TaskItem] = []
    for model_sought in sought:
        if len(items) == count:
            break
        room = tokens - len(tokenizer.encode(model_sought.head)) - pool.end
        short = len(tokenizer.encode(model_sought.answer, add_special_tokens=False)) <= _ANSWER_TOKENS
        if short and pool.lengths[model_sought.passage] <= room // 2:
            items.append(_item(task, model_sought, pool.around(model_sought, room)))
    if count is not None and len(items) < count:
        raise CorpusError(
            f"{task} has {len(items)} items of {split} with a prefix of {tokens} tokens, {count} are asked for; "
            "ask for fewer or allow more tokens"
        )
    return items


class _Pool:
    """The passages of one split and their lengths in tokens, each counted once with the blank line before it.

    Tokenizers that join across that line make a prefix shorter than the sum, never longer.
    """

    def __init__(self, passages: list[str], tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> None:
        encoded = tokenizer([f"\n\n{p}" for p in passages], add_special_tokens=False)["input_ids"]
        self.lengths = dict(zip(passages, map(len, encoded), strict=True))
        self.end = len(tokenizer.encode("\n", add_special_tokens=False))
        self._passages, self._rng = passages, rng

    def around(self, sought: _Sought, room: int) -> list[str]:
        """The passage of ``sought`` at a random place among others that fit into ``room`` tokens with it."""
        room -= self.lengths[sought.passage]
        start, missed = self._rng.randrange(len(self._passages)), 0
        clue, chosen = sought.clue.casefold(), []
        for passage in chain(self._passages[start:], self._passages[:start]):
            if self.lengths[passage] > room or passage == sought.passage or clue in passage.casefold():
                missed += 1
                if missed == _PATIENCE:
                    break
                continue
            missed = 0
            room -= self.lengths[passage]
            chosen.append(passage)
        chosen.insert(self._rng.randint(0, len(chosen)), sought.passage)
        return chosen


def _item(task: str, sought: _Sought, passages: list[str]) -> TaskItem:
    prefix = "\n\n".join([sought.head, *passages]) + "\n"
    digest = hashlib.sha256(f"{sought.passage}\n{sought.head}".encode()).hexdigest()
    return TaskItem(f"{task}-{digest[:12]}", task, prefix, sought.suffix, (sought.answer,))


def _qa(split: str, rng: random.Random) -> tuple[list[str], list[_Sought]]:
    sought = [
        _Sought(_folded(item.passage), f"Question: {item.question}", "\nAnswer:", item.answers[0], item.answers[0])
        for item in load_qa("sciq", split)
    ]
    return [s.passage for s in sought], sought


def _lead(split: str, rng: random.Random) -> tuple[list[str], list[_Sought]]:
    questions = {_folded(passage): question for passage, question in boolq_prompts(split)}
    sought = []
    for passage, question in questions.items():
        first, *more = _SENTENCE_END.split(passage)
        if more and len(first.split()) >= _LEAST_LEAD_WORDS:
            sought.append(_Sought(passage, f"Topic: {question}", "\nSummary:", first, first))
    return list(questions), sought


def _copy(split: str, rng: random.Random) -> tuple[list[str], list[_Sought]]:
    passages = [_folded(passage) for passage in running_text(split)]
    sought = []
    for passage in passages:
        fit = [words for s in _SENTENCE_END.split(passage) if len(words := s.split()) in _COPY_WORDS]
        if not fit:
            continue
        words = rng.choice(fit)
        shown, rest = " ".join(words[:_COPY_SHOWN]), " ".join(words[_COPY_SHOWN:])
        if passage.casefold().count(shown.casefold()) == 1:
            sought.append(_Sought(passage, f"Find: {shown}", f"\nSentence: {shown}", rest, shown))
    return passages, sought


_SOURCES: dict[str, Callable[[str, random.Random], tuple[list[str], list[_Sought]]]] = {
    "qa": _qa,
    "lead": _lead,
    "copy": _copy,
}


def _folded(passage: str) -> str:
    """Fold the passage to one line: a line end stops an answer, and blank lines part passages."""
    return " ".join(passage.split())


# Items by name, wherever they come from, and how each is scored.

_TASKS: dict[str, Task] = {**TASKS, **longbench.TASKS}


def load_items(
    source: str, split: str, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int | None
) -> list[TaskItem]:
    """``count`` items (None: all there are) with prefixes of at most ``tokens`` tokens.

    ``source`` is "qa", "lead", "copy" (constructed from the pinned passages) or the path of a LongBench .jsonl file.
    Raises CorpusError naming what is missing or wrong.
    """
    if source in TASKS:
        return build(source, split, tokenizer, tokens, count)
    if source.endswith(".jsonl"):
        return longbench.items(source, split, tokenizer, tokens, count)
    raise CorpusError(f"no task is called {source!r}; known: {', '.join(TASKS)}, a LongBench .jsonl file")


def task_of(item: TaskItem) -> Task:
    """Return the task that takes and scores the answers to ``item``."""
    return _TASKS[item.task]
