"""Items by name, wherever they come from, and how each is scored."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from firsttoken.droidspeak.items import Task, TaskItem
from firsttoken.study.errors import CorpusError
from firsttoken_studies.droidspeak.tasks import constructed, longbench

_TASKS: dict[str, Task] = {**constructed.TASKS, **longbench.TASKS}


def load_items(
    source: str, split: str, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int | None
) -> list[TaskItem]:
    """``count`` items (None: all there are) with prefixes of at most ``tokens`` tokens.

    ``source`` is "qa", "lead", "copy" (constructed from the pinned passages) or the path of a LongBench .jsonl file.
    Raises CorpusError naming what is missing or wrong.
    """
    if source in constructed.TASKS:
        return constructed.build(source, split, tokenizer, tokens, count)
    if source.endswith(".jsonl"):
        return longbench.items(source, split, tokenizer, tokens, count)
    raise CorpusError(f"no task is called {source!r}; known: {', '.join(constructed.TASKS)}, a LongBench .jsonl file")


def task_of(item: TaskItem) -> Task:
    """How answers to ``item`` are taken and scored."""
    return _TASKS[item.task]
