"""What experiments are given in place of text, peers, links and neighbours: made up, and there at once."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from swarms import Here

from firsttoken.assets.qa_files import QAItem
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.profile.layer_profiler import Score
from firsttoken.droidspeak.profile.pareto import Profiled
from firsttoken.simulation.workload.conversations import Conversations
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_studies.choice_tasks import ChoiceItem
from firsttoken_studies.droidspeak.reuse_items import TaskItem
from firsttoken_studies.nb15_recovery_timeline import trial as timeline_trial
from firsttoken_studies.nb18_what_a_draft_is_worth import answer_trial
from firsttoken_studies.nb30_full_reuse_and_sensitivity import profiling
from firsttoken_studies.nb45_beside_vllm import study as live_peer
from firsttoken_studies.nb45_beside_vllm.study import PeerConfig, PeerModel
from firsttoken_studies.nb56_a_start_that_borrows import borrow_trial as borrowed_trial
from firsttoken_studies.nb56_a_start_that_borrows import borrowed_start as borrowed
from firsttoken_studies.nb56_a_start_that_borrows import fetch_trial
from firsttoken_studies.nb56_a_start_that_borrows import parallel_start as parallel
from firsttoken_studies.nb56_a_start_that_borrows.borrow_spec import BorrowSpec
from firsttoken_studies.nb61_five_at_once import trial as window
from firsttoken_studies.progressiveserve.coldstart import trial
from firsttoken_studies.record.results import Result


def questions(source: str, split: str) -> list[QAItem]:
    """Forty questions of any source, without a passage where it is TriviaQA."""
    passage = "" if "trivia" in source else "Mr {i} is in."
    return [QAItem(f"{split}-{i}", passage.format(i=i), "Who?", (f"{i}",)) for i in range(40)]


def choice_questions(task: str, count: int) -> list[ChoiceItem]:
    """Questions of any multiple-choice task, whose options are one letter each."""
    return [ChoiceItem((f"{i}:",) * 3, ("a", "b", "c"), i % 3) for i in range(count)]


def items(task: str, split: str, tokenizer: Any, tokens: int, count: int | None) -> list[TaskItem]:
    """Items of ``task`` whose prefixes have just ``tokens`` tokens."""
    name = Path(task).stem
    texts = ["".join(random.Random(f"{split} {i}").choices("abcd ", k=tokens)) for i in range(count or 8)]
    return [TaskItem(f"{name}-{split}-{i}", name, text, "\nA:", ("a",)) for i, text in enumerate(texts)]


def plausible(rows: list[dict[str, Any]]) -> list[Profiled]:
    """What was profiled, with losses as a real pair has them: the fewer layers are recomputed, the more is lost."""
    found = profiled_groups(rows)
    depth = max(len(one.group) for one in found)
    return [
        dataclasses.replace(one, own=(1.0,) * len(one.own), mixed=(0.5 + len(one.group) / depth / 2,) * len(one.own))
        for one in found
    ]


def by_distance(kind: str, group: Group, score: Score) -> list[Any]:
    """What profiling keeps of a score, its accuracy the less the further the output moves: random tokens are never
    right."""
    return [kind, group.lo, group.hi, score.nll.tolist(), (1 - score.deviation).clamp(0, 1).tolist()]


profiled_groups = profiling.profiled_groups


def timed() -> Result:
    """What prefill_latency would have recorded: times in proportion to what is computed."""
    shares = {"full prefill": [1.0], "DroidSpeak": [0.0, 0.5], "CacheBlend": [0.2], "smaller model": [0.5]}
    rows = [
        {"method": name, "tokens": 64, "compute": share, "round": step, "first_token_s": 0.1 + share}
        for name, each in shares.items()
        for share in each
        for step in range(2)
    ]
    return Result("prefill_latency", "quick", {}, {"slug": "x"}, {}, "", [0], "2026-01-01", 0.0, {}, rows, {}, {})


def few_conversations(tokenizer: Any, *_: Any) -> Conversations:
    """As many of 1,000 tokens as of 2,000, half of them prompt, so that requests outgrow the pool."""
    totals = np.array([1000, 2000] * 40)
    starts = np.concatenate([[0], np.cumsum(totals // 2)])
    ids = np.arange(starts[-1] if tokenizer else 0) % 200
    return Conversations(ids, starts, totals // 2)


def short_conversations(tokenizer: Any) -> Conversations:
    """As many prompts of 10 tokens as of 40, with answers of five."""
    starts = np.concatenate([[0], np.cumsum([10, 40] * 20)])
    return Conversations(np.arange(starts[-1]) % 200, starts, np.full(40, 5))


def in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A trial without a process of its own; there is no other command."""
    if command[:2] != [sys.executable, "-m"]:
        raise FileNotFoundError(command[0])
    if command[2] in (borrowed.TRIAL, parallel.TRIAL):
        told = json.loads(command[-1]) | {"spawned_s": trial.INTERPRETER_UP, "gbit_per_s": 0.0, "cores": ()}
        of, kind = {
            borrowed.TRIAL: (borrowed_trial, BorrowSpec),
            parallel.TRIAL: (fetch_trial, fetch_trial.FetchSpec),
        }[command[2]]
        answer: Any = {"variant": told["variant"]} | of.main(kind(**told))
    elif command[2] == window.__name__:
        told = json.loads(Path(command[3]).read_text(encoding="utf-8")) | {"cores": ()}
        answer = window.main(window.WindowSpec(**told))
    elif command[2] == timeline_trial.__name__:
        answer = timeline_trial.main(timeline_trial.TimelineSpec(**json.loads(options["input"])))
    elif command[2] == answer_trial.__name__:
        spec = answer_trial.AnswerSpec(**json.loads(command[-1]) | {"spawned_s": trial.INTERPRETER_UP})
        answer = {"variant": spec.variant} | answer_trial.main(spec)
    else:
        spec = trial.TrialSpec(**json.loads(command[-1]) | {"spawned_s": trial.INTERPRETER_UP, "gbit_per_s": 0.0})
        answer = {"variant": spec.variant} | trial.main(spec)
    return subprocess.CompletedProcess(command, 0, json.dumps(answer), "")


def asked_peer(system: str, model: PeerModel, budget: int, load: PeerConfig, seed: int) -> dict[str, float]:
    """What a client would have seen of a server of a model that is there; either has an environment of its own."""
    assert (model.folder / "tokenizer.json").is_file() and load.prompt_tokens < model.longest
    return {column: 1.0 + budget for column, _, _ in live_peer.METRICS.values()}


def vllm_answers(job: dict[str, Any], folder: Path, lines: int) -> list[dict[str, Any]]:
    """What vLLM would have answered: a token of each request every tenth of a second, and one preemption."""
    assert (folder / "model" / "config.json").is_file() and lines == 1 + len(job["turns"])
    lengths = [[item["output_tokens"] for item in job["loads"][load]] for load, _ in job["turns"]]
    times = [[[0.1 * token for token in range(1, 1 + count)] for count in counts] for counts in lengths]
    return [{"vllm": "0"}, *({"times_s": times_s, "preemptions": 1} for times_s in times)]


@contextmanager
def counted_lender(folder: Path, depth: int, *_: Any) -> Iterator[tuple[str, int]]:
    """A warm neighbour in this process."""
    with closing(Here(folder)) as here:
        yield here.serve((0, depth))[0].record.address, os.getpid()


class Lending:
    """Fetchers in this process that have their ``layers``."""

    def __init__(self, here: Here, layers: Sequence[range]) -> None:
        self._here, self._layers = here, layers

    def go(self) -> None:
        pass

    def lenders(self) -> list[Lender]:
        up = self._here.serve(*((one.start, one.stop) for one in self._layers))
        return [Lender(one.record.address, layers) for one, layers in zip(up, self._layers, strict=True)]

    def let_go(self) -> list[dict[str, Any]]:
        return [{"bytes": 1, "loaded_s": time.monotonic()} for _ in self._layers]


@contextmanager
def lending(folder: Path, layers: Sequence[range], *_: Any) -> Iterator[Lending]:
    """Fetchers without processes of their own."""
    with closing(Here(folder)) as here:
        yield Lending(here, layers)


class Busy:
    """A neighbour's own request with a token every tenth of a second."""

    def times_s(self) -> list[float]:
        return [time.monotonic() - 0.1 * n for n in range(1000)]


class NoLimit:
    """A limit in the kernel that holds nothing back."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> NoLimit:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def join(self) -> None:
        pass


def passages(split: str) -> list[tuple[str, str]]:
    """Forty passages a split, and a question about each."""
    return [(f"In {split} the house number {i} stands in the wind.", f"is house {i} in it?") for i in range(40)]
