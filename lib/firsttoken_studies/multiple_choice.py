"""Multiple-choice accuracy of variants of one model, measured and summarised alike for every notebook that has it.

The option whose text a model finds likeliest behind its context is its answer. The rows keep which option each variant
chose, in the order of the task, and one row a task the right ones.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.qa_files import kept_rows
from firsttoken.study import timing
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import non_empty
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, paired_bootstrap
from firsttoken.study.summary import Scalar, Summary
from firsttoken_studies.choice_tasks import LIKELIEST, TASKS, ChoiceItem, check_count, choice_items
from firsttoken_studies.record.results import Rows

Choose: TypeAlias = Callable[[Sequence[float], Sequence[int]], int]
"""The nats of each option of a question, and its bytes or 1 -> the number of the option that is taken."""
_TASK = re.compile(r"(\w+) ([1-9]\d{0,5})")
_PART = 128  # questions whose options are kept together: three minutes of half a billion parameters on two cores
_CHOOSING = "choices 1"  # another name when what is kept is made in another way


def likeliest(nats: Sequence[float], sizes: Sequence[int]) -> int:
    """Return the option whose continuation has the fewest ``nats`` for its size."""
    return min(range(len(nats)), key=lambda option: nats[option] / sizes[option])


@dataclass(frozen=True)
class ChoiceTasksConfig:
    """``tasks`` as "hellaswag 1000", a task and how many of its questions; ``batch`` questions at once."""

    tasks: Annotated[tuple[str, ...], non_empty]
    batch: int

    def __post_init__(self) -> None:
        for task in self.tasks:
            if not _TASK.fullmatch(task):
                raise ProfileError(f"tasks: {task!r} is no task with a number of questions, such as hellaswag 1000")
            check_count(*self._split(task))
        names = [task.split()[0] for task in self.tasks]
        if len(set(names)) < len(names):
            raise ProfileError(f"tasks: one of them is there twice in {', '.join(self.tasks)}; name each once")

    @staticmethod
    def _split(task: str) -> tuple[str, int]:
        name, _, count = task.partition(" ")
        return name, int(count)

    @cached_property
    def items(self) -> dict[str, list[ChoiceItem]]:
        """The questions of each task. Raises CorpusError and AssetError as ``choice_items`` does."""
        return {task: choice_items(task, count) for task, count in map(self._split, self.tasks)}

    def right(self) -> Rows:
        """One row a task: the right options."""
        return [{"task": task, "right": [item.answer for item in items]} for task, items in self.items.items()]

    def chosen(
        self,
        variant: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        choose: Choose = likeliest,
        weights: str = "",
    ) -> Rows:
        """One row a task: the options that ``variant`` is taken to ``choose``.

        With the sha256 of the ``weights`` they are kept part by part, so that a run that was cut off goes on there.
        """
        rows: Rows = []
        for task, items in self.items.items():
            chosen = list[int]()
            for first in range(0, len(items), _PART):
                part = items[first : first + _PART]
                make = partial(choices, model, tokenizer, part, self.batch, TASKS[task].by_length, choose)
                chosen += _kept((_CHOOSING, weights, variant, task, part), make) if weights else make()
            rows.append({"task": task, "variant": variant, "chosen": chosen})
        return rows


def _kept(key: object, make: Callable[[], list[int]]) -> list[int]:
    """Return what ``make`` gives, or gave to an earlier run with this ``key``."""
    start, name = time.perf_counter(), hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    (row,) = kept_rows(f"choices-{name}", lambda: [{"chosen": make(), "seconds": time.perf_counter() - start}])
    timing.add_resumed(row["seconds"] - (time.perf_counter() - start))  # nothing where it was made now
    return row["chosen"]


def accuracy_summary(rows: Rows, places: Mapping[str, dict[str, Scalar]], baseline: str) -> Summary:
    """Accuracy in % of every variant, at its place in ``places``; the points that it has more than ``baseline`` and the
    share of equal answers, both paired by question; and the points averaged over the tasks, each counted alike."""
    right = {row["task"]: np.array(row["right"]) for row in rows if "right" in row}
    chosen = {(row["variant"], row["task"]): np.array(row["chosen"]) for row in rows if "chosen" in row}
    question_count = sum(map(len, right.values()))
    summary = Summary()
    for variant in dict.fromkeys(name for name, _ in chosen):
        labels, changes = places[variant], []
        for task, answers in right.items():
            correct = chosen[variant, task] == answers
            summary.add("accuracy_pct", bootstrap(correct).summary("%", 100), **labels, task=task)
            if variant != baseline:
                before = (chosen[baseline, task] == answers).astype(float)
                change = paired_bootstrap(correct.astype(float), before)
                summary.add("accuracy_change", change.summary("points", 100), **labels, task=task)
                same = bootstrap(chosen[variant, task] == chosen[baseline, task])
                summary.add("same_choice_pct", same.summary("%", 100), **labels, task=task)
                changes.append((correct - before) * (question_count / len(right) / len(answers)))
        if len(changes) > 1:  # weighted so that the mean over all questions is the mean of the tasks' means
            mean = bootstrap(np.concatenate(changes))
            summary.add("accuracy_change", mean.summary("points", 100), **labels, across="mean")
    return summary


def choices(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[ChoiceItem],
    batch: int,
    by_length: bool,
    choose: Choose = likeliest,
) -> list[int]:
    """The option that the model is taken to ``choose``, for each item: by the nats of its continuation and, with
    ``by_length``, by its bytes."""
    return [
        choose(nats, [len(text.encode()) if by_length else 1 for text in item.continuations])
        for item, nats in zip(items, option_losses(model, tokenizer, items, batch), strict=True)
    ]


@torch.inference_mode()
def option_losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: Sequence[ChoiceItem], batch: int
) -> list[list[float]]:
    """The nats of every option's continuation behind its context, for each item; ``batch`` items at once, the longest
    first, so that what does not fit the memory fails at once."""
    rows = [_PackedOptions.of(item, tokenizer) for item in items]
    order = sorted(range(len(rows)), key=lambda row_index: -len(rows[row_index].ids))
    losses: dict[int, list[float]] = {}
    for first in track(range(0, len(order), batch), desc="choices", leave=False):
        chosen = order[first : first + batch]
        losses |= dict(zip(chosen, _losses(model, [rows[row_index] for row_index in chosen]), strict=True))
    return [losses[item_index] for item_index in range(len(items))]


@dataclass
class _PackedOptions:
    """All options of a question as one row of tokens, in segments: each context once, and every continuation.

    A token has a position, and sees its own segment and the segment ``before`` it. The four endings of HellaSwag share
    a context of some 50 tokens: 170 tokens a question instead of 319 (mean of 500).

    ``scored`` are the places of each option: where its tokens are foretold, and the tokens, none for ``LIKELIEST``.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)  # by segment, the context's; its own where it is a context
    scored: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, item: ChoiceItem, tokenizer: PreTrainedTokenizerBase) -> _PackedOptions:
        packed, contexts = cls(), dict[tuple[int, ...], tuple[int, int]]()
        for context, continuation in zip(item.contexts, item.continuations, strict=True):
            if continuation == LIKELIEST:
                packed.scored.append((packed.scored[0][0], []))
                continue
            context_ids = tokenizer(context)["input_ids"]
            continuation_ids = tokenizer(f"{context} {continuation}")["input_ids"][len(context_ids) :]
            key = tuple(context_ids)
            if key not in contexts:
                contexts[key] = (packed._add(context_ids, 0), len(packed.ids) - 1)
            segment, last = contexts[key]
            start = len(packed.ids)
            packed._add(continuation_ids, len(context_ids), segment)
            packed.scored.append(([last, *range(start, len(packed.ids) - 1)], continuation_ids))
        return packed

    def _add(self, ids: list[int], position: int, before: int | None = None) -> int:
        segment = len(self.before)
        self.ids += ids
        self.positions += range(position, position + len(ids))
        self.segments += [segment] * len(ids)
        self.before.append(segment if before is None else before)
        return segment

    def seen(self) -> Tensor:
        """Return whether a token [tokens] sees another [tokens]."""
        segments = torch.tensor(self.segments)
        behind = torch.tensor(self.before)[segments]
        same_segment = (segments[:, None] == segments[None]) | (behind[:, None] == segments[None])
        return same_segment & torch.ones_like(same_segment).tril()


def _losses(model: PreTrainedModel, rows: Sequence[_PackedOptions]) -> list[list[float]]:
    width, device = max(len(row.ids) for row in rows), model.device
    ids, positions = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    mask = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)  # padding sees itself, or softmax has no number
    for row_index, row in enumerate(rows):
        size = len(row.ids)
        ids[row_index, :size], positions[row_index, :size] = torch.tensor(row.ids), torch.tensor(row.positions)
        mask[row_index, :size, :size] = row.seen()
    hidden = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)[:, None]
    pairs = dict.fromkeys((i, token) for i, row in enumerate(rows) for tokens, _ in row.scored for token in tokens)
    index = tuple(torch.tensor(list(pairs), device=device).T)
    # the head of 151,936 tokens is a quarter of the work of half a billion parameters, and half of the tokens need none
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0][index],))
    try:
        logits = model(
            ids.to(device), attention_mask=hidden.to(device), position_ids=positions.to(device), use_cache=False
        ).logits
    finally:
        hook.remove()
    by_pair = dict(zip(pairs, logits.float(), strict=True))
    return [
        [_nats(torch.stack([by_pair[i, token] for token in tokens]), answer_ids) for tokens, answer_ids in row.scored]
        for i, row in enumerate(rows)
    ]


def _nats(logits: Tensor, ids: Sequence[int]) -> float:
    """The nats of the tokens ``ids``, or of the likeliest ones, by the ``logits`` [tokens, vocabulary]."""
    tokens = torch.tensor(ids, device=logits.device) if ids else logits.argmax(-1)
    return F.cross_entropy(logits, tokens, reduction="sum").item()
