"""What every experiment here starts from: runs of a pair on a task, and held-out items that no model was tuned on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.assets.needs import CONTEXT, MEMORY, ModelFacts, Need, check, device_memory, weight_bytes
from firsttoken.study.errors import CorpusError, ModelError, ProfileError
from firsttoken.study.profile import Profile
from firsttoken_studies.droidspeak import longbench
from firsttoken_studies.droidspeak.constructed_tasks import load_items
from firsttoken_studies.droidspeak.pairs import Models, Pair, PairedModel, shown
from firsttoken_studies.droidspeak.reuse_items import Encoded, TaskItem, encode
from firsttoken_studies.record.results import Rows

HELD_OUT = "held-out items"  # of a task's file; the constructed tasks count theirs once there is a tokenizer
ITEMS = "reuse.items"


@dataclass(frozen=True)
class ReuseConfig:
    """``runs`` as ``Run.parse`` reads them; ``adapters`` as in ``adapters_folder``.

    ``items`` held-out items serve to choose a group and ``eval_items`` others to judge it; ``batch`` of them are run at
    a time.
    """

    runs: tuple[str, ...]
    adapters: str
    items: int
    eval_items: int
    batch: int


@dataclass(frozen=True)
class Run:
    """A pair on a task, with prefixes of up to ``tokens`` tokens; groups begin and end at every ``step``-th layer."""

    pair: Pair
    task: str
    tokens: int
    step: int = 2

    @classmethod
    def parse(cls, text: str) -> Run:
        """ "receiver <- sender: task, 320 tokens", and if need be ", groups of 5" (without: of 2, as in the paper).

        Raises ProfileError for anything else.
        """
        match = re.fullmatch(r"(.+):\s*(\S.*?)\s*,\s*(\d+) tokens(?:,\s*groups of ([1-9]\d*))?", text)
        if not match:
            raise ProfileError(f"run {text!r}: write it as 'receiver <- sender: task, 320 tokens'")
        return cls(Pair.parse(match[1]), match[2], int(match[3]), int(match[4] or 2))

    def needs(self, config: ReuseConfig) -> list[Need]:
        """Require a receiver whose context holds a prefix, and held-out splits of the task that hold all items."""
        items = config.items + config.eval_items
        return [
            Need("reuse.runs", self.tokens, CONTEXT, "shorten its prefixes"),
            Need("reuse.items + eval_items", items, HELD_OUT),
        ]

    def edges(self, depth: int) -> list[int]:
        """Return the layers at which groups may begin and end in a model of ``depth`` layers."""
        return [*range(0, depth, self.step), depth]

    @property
    def name(self) -> str:
        """The run as the profile names it, with a task's file by its name only."""
        return f"{self.pair}: {Path(self.task).stem}"

    @property
    def key(self) -> str:
        """The name in one word, as rows have it that belong to several runs."""
        row = self.row()
        return re.sub(r"\W+", "_", " ".join((row["receiver"], "from", row["sender"], row["task"])))

    def row(self) -> dict[str, str]:
        """The columns that say which run a row belongs to."""
        receiver, sender = shown(self.pair.receiver), shown(self.pair.sender)
        return {"run": self.name, "receiver": receiver, "sender": sender, "task": Path(self.task).stem}


def run_of(row: dict[str, Any]) -> dict[str, str]:
    """Return the place in a summary of the measures of a row's run."""
    return {name: row[name] for name in ("receiver", "sender", "task")}


def rows_by_run(rows: Rows) -> dict[str, Rows]:
    """The rows of each run by its name, in the order of the profile."""
    by_run: dict[str, Rows] = {}
    for row in rows:
        by_run.setdefault(row["run"], []).append(row)
    return by_run


class Setting:
    """A profile's runs with their models and items.

    Raises ProfileError, before anything is loaded, for a run that its receiver, its task or the device's memory does
    not hold, and for what an experiment's own ``needs`` ask beyond that of the receiver of the first run.
    """

    def __init__(self, profile: Profile, needs: Iterable[Need] = ()) -> None:
        self.config = profile.section("reuse", ReuseConfig)
        self.runs = [Run.parse(text) for text in self.config.runs]
        self.models = Models(profile, self.config.adapters)
        self.seed = profile.seed
        for run in self.runs:
            receiver = self.models.spec(run.pair.receiver)
            check(run.needs(self.config), ModelFacts(receiver, held_out(run.task)), context=run.name)
        names = {name for run in self.runs for name in (run.pair.receiver, run.pair.sender)}
        specs = [self.models.spec(name) for name in names]
        sizes = {spec: weight_bytes(spec, profile.torch_dtype()) for spec in set(specs)}
        weights = sum(sizes[spec] for spec in specs)
        room = {MEMORY: device_memory(profile.torch_device()), ITEMS: self.config.items}
        check([Need("reuse.runs", weights, MEMORY, "name smaller models")], room, context="the device")
        check(needs, ModelFacts(self.models.spec(self.runs[0].pair.receiver), room))

    def pair(self, run: Run) -> tuple[PairedModel, PairedModel]:
        """Receiver and sender of ``run``.

        Raises CacheError when they are not of one architecture and tokenizer, ModelError when they have none.
        """
        receiver, sender = self.models.load(run.pair.receiver), self.models.load(run.pair.sender)
        receiver.check_sender(sender)
        if receiver.tokenizer is None:
            raise ModelError(f"{run.pair} has no tokenizer, so it cannot be asked; take models that come with one")
        return receiver, sender

    def items(self, run: Run, tokenizer: object) -> tuple[list[Encoded], list[Encoded]]:
        """Return the items of ``chosen_and_judged`` in the profile's sizes."""
        return chosen_and_judged(run, tokenizer, self.config.items, self.config.eval_items)


def chosen_and_judged(run: Run, tokenizer: object, items: int, eval_items: int) -> tuple[list[Encoded], list[Encoded]]:
    """``items`` held-out items of ``run`` to choose with and ``eval_items`` to judge with, none in both.

    Raises CorpusError when the held-out splits have too few.
    """
    wanted = items + eval_items
    encoded_items = [encode(item, tokenizer) for item in held_out_items(run.task, tokenizer, run.tokens)[:wanted]]
    if len(encoded_items) < wanted:
        raise CorpusError(
            f"{run.name} has {len(encoded_items)} held-out items with prefixes of {run.tokens} tokens, not {wanted}; "
            "lower its section's items or eval_items, or allow longer prefixes"
        )
    return encoded_items[:items], encoded_items[items:]


def held_out(task: str) -> dict[str, int]:
    """Return the number of items of ``task`` that no model was tuned on, where its file alone tells. Raises CorpusError
    as ``read``."""
    if not task.endswith(".jsonl"):
        return {}
    return {HELD_OUT: sum(longbench.size(task, split) for split in ("test", "validation"))}


def batches(items: Sequence[Encoded], size: int) -> Iterator[list[Encoded]]:
    """``items`` in batches, those of like length together, so that little is padded."""
    ordered = sorted(items, key=lambda item: (len(item.prefix), item.item.id))
    for first in range(0, len(ordered), size):
        yield ordered[first : first + size]


def held_out_items(task: str, tokenizer: Any, tokens: int) -> list[TaskItem]:
    """All items of ``task`` that no model was tuned on, with prefixes of at most ``tokens`` tokens, in the order in
    which they are taken: a group is chosen by the first ones."""
    return [item for split in ("validation", "test") for item in load_items(task, split, tokenizer, tokens, None)]
