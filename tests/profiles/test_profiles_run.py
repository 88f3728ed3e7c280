"""Every experiment of every profile runs to its summary, on tiny shapes that keep the profile's own relations.

One rule makes them: models keep their layers and lose their width; lengths in tokens and the models' contexts are a
32nd; whatever is only counted (items, rounds, draws) is 2 at most. Trials run in this process, and nothing is read or
fetched. What the claims ask must then be in the summaries.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from firsttoken.assets import corpora, models, needs, shapes
from firsttoken.assets.qa_files import QAItem
from firsttoken.engine.experiments import online
from firsttoken.engine.workload import sharegpt
from firsttoken.engine.workload.conversations import Conversations
from firsttoken.experiments import EVERY_PROFILE, EXPERIMENTS
from firsttoken.kvreuse.experiments import gating, methods, profiling, setting, transfer
from firsttoken.kvreuse.experiments import training as reuse_training
from firsttoken.kvreuse.profile.pareto import Profiled
from firsttoken.kvreuse.tasks.items import TaskItem
from firsttoken.progressive import examination, training
from firsttoken.progressive.coldstart import harness, materials, trial
from firsttoken.progressive.recipe import RECIPES
from firsttoken.progressive.recovery import timeline_trial
from firsttoken.study import paths
from firsttoken.study.claims import load_claims
from firsttoken.study.profile import Profile, load_profile

SHORTER = 32
LENGTHS = {"tokens", "window_tokens", "max_tokens", "max_prompt_tokens", "prompt_tokens", "new_tokens"}
LENGTHS |= {"contexts", "context_tokens", "continue_tokens", "sweep_tokens"}
COUNTS = {"passages", "items", "eval_items", "windows", "prompts", "closed_book", "calibration", "calibration_passages"}
COUNTS |= {"watch_questions", "watch_windows", "search_windows", "rounds", "few_rounds", "repeats", "recomputes"}
COUNTS |= {"runs", "trials", "draws", "seeds", "steps", "clients", "readers", "frontier", "copy_mib", "disk_mib"}
FIXED = {"resamples": 20, "matmul_n": 64, "duration_s": 0.6, "sample_s": 0.05, "preemptions": 10, "short": 4, "long": 4}
CASES = [(name, profile) for name, experiment in EXPERIMENTS.items() for profile in experiment.profiles]


def shorter(value: Any) -> Any:
    """A length, or each of several, by the rule."""
    return [shorter(one) for one in value] if isinstance(value, list) else max(2, value // SHORTER)


def scaled(key: str, value: Any) -> Any:
    """One entry of a profile by the rule."""
    if key == "runs" and isinstance(value, list):
        return [re.sub(r"(\d+) tokens", lambda found: f"{shorter(int(found[1]))} tokens", run) for run in value]
    if key in LENGTHS:
        return shorter(value)
    if key in COUNTS:
        return min(value, 2)
    if key == "systems":
        return [name for name in value if name != "vllm"]  # has an environment of its own
    return FIXED.get(key, value)


def tiny_profile(name: str, folder: Path) -> Profile:
    """The profile ``name`` by the rule, on a CPU, with adapters below ``folder``."""
    content = yaml.safe_load((paths.PROFILES / f"{name}.yaml").read_text(encoding="utf-8"))
    sections = {key: value for key, value in content.items() if isinstance(value, dict)}
    sections["quality"].setdefault("max_prompt_tokens", examination.QualityConfig.max_prompt_tokens)
    overrides: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
    for section, entries in sections.items():
        overrides |= {f"{section}.{key}": scaled(key, value) for key, value in entries.items()}
    for key in ("served.adapters", "reuse.adapters"):
        section, _, entry = key.partition(".")
        overrides[key] = str(folder / "adapters" / sections[section][entry])
    live = sections["live_policies"]  # pool and lengths by another number: a request must outgrow a block of 16 tokens
    overrides |= {"live_policies.scale": live["scale"] / 8, "live_policies.blocks": live["blocks"] // 8}
    sections["quality"].pop("max_prompt_tokens")
    return load_profile(name, **overrides)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; token 0 is the end of text."""
    symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(kinds.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)


def questions(source: str, split: str) -> list[QAItem]:
    """Forty questions of any source, without a passage where it is TriviaQA."""
    passage = "" if "trivia" in source else "Mr {i} is in."
    return [QAItem(f"{split}-{i}", passage.format(i=i), "Who?", (f"{i}",)) for i in range(40)]


def items(task: str, split: str, tokenizer: Any, tokens: int, count: int | None) -> list[TaskItem]:
    """Items of ``task`` whose prefixes have just ``tokens`` tokens."""
    name = Path(task).stem
    texts = ["".join(random.Random(f"{split} {i}").choices("abcd ", k=tokens)) for i in range(count or 8)]
    return [TaskItem(f"{name}-{split}-{i}", name, text, "\nA:", ("a",)) for i, text in enumerate(texts)]


def plausible(rows: list[dict[str, Any]]) -> list[Profiled]:
    """What was profiled, with losses as a real pair has them: the fewer layers are recomputed, the more is lost."""
    found = profiling_groups(rows)
    depth = max(len(one.group) for one in found)
    return [
        Profiled(one.group, (1.0,) * len(one.own), (0.5 + len(one.group) / depth / 2,) * len(one.own)) for one in found
    ]


profiling_groups = profiling.profiled_groups


def conversation_lengths(*_: Any) -> Conversations:
    """As many of 1,000 tokens as of 2,000, three quarters of them prompt."""
    totals = np.array([1000, 2000] * 40)
    starts = np.concatenate([[0], np.cumsum(totals * 3 // 4)])
    return Conversations(np.arange(starts[-1]) % 200, starts, totals - totals * 3 // 4)


def in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A trial without a process of its own."""
    if command[2].endswith("timeline_trial"):
        answer: Any = timeline_trial.main(timeline_trial.TimelineSpec(**json.loads(options["input"])))
    else:
        spec = trial.TrialSpec(**json.loads(command[-1]) | {"spawned_s": trial.INTERPRETER_UP, "gbit_per_s": 0.0})
        answer = {"variant": spec.variant} | trial.main(spec)
    return subprocess.CompletedProcess(command, 0, json.dumps(answer), "")


class World:
    """Tiny models and made-up data in place of all that profiles name; each experiment is run once for one setting."""

    def __init__(self, folder: Path, truth: Any) -> None:
        self.folder, self._truth = folder, truth
        self._results: dict[str, Any] = {}

    def model(self, spec: str, *_: Any) -> Path:
        """The folder of a model with the layers of ``spec`` and a 32nd of its context."""
        folder = self.folder / "models" / re.sub(r"\W", "-", spec)
        if not folder.is_dir():
            torch.manual_seed(len(spec))
            config = self._truth.config(spec)
            config.vocab_size = 257
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            bytes_tokenizer().save_pretrained(folder)
        return folder

    def summary(self, name: str, profile: str) -> dict[str, Any]:
        """What the experiment gives under the profile; the same settings need no second run."""
        made = tiny_profile(profile, self.folder)
        outcome = EXPERIMENTS[name](made)
        assert outcome.summary or name == "reuse_training"
        json.dumps(outcome.rows, default=lambda value: value.item())
        return outcome.summary


@pytest.fixture(scope="module")
def world(truth: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    made = World(folder, truth)
    with pytest.MonkeyPatch.context() as patch:
        narrow = {
            name: (kind, (depth, 32, 64, 4, 2, 257, context // SHORTER, *rest))
            for name, (kind, (depth, _, _, _, _, _, context, *rest)) in shapes._SHAPES.items()
        }
        patch.setattr(shapes, "_SHAPES", narrow)
        patch.setattr(paths, "CACHE", folder / "cache")
        patch.setattr(subprocess, "run", in_this_process)
        patch.setattr(harness, "available", lambda folder: "not in a test")
        for place in (models,):
            patch.setattr(place, "converted", made.model)
            patch.setattr(place, "_from_hub", made.model)
        for place in (needs, examination, training, materials):
            patch.setattr(place, "load_qa", questions)
        for place in (corpora, training):
            patch.setattr(place, "boolq_prompts", passages)
        for place in (setting, reuse_training):
            patch.setattr(place, "load_items", items)
        patch.setattr(setting, "held_out", lambda task: {})
        for place in (profiling, methods, gating, transfer):
            patch.setattr(place, "profiled_groups", plausible)
        for place in (sharegpt, online):
            patch.setattr(place, "conversations", conversation_lengths)
        for name, recipe in list(RECIPES.items()):
            patch.setitem(RECIPES, name, dataclasses.replace(recipe, steps=1, accumulate=1, warmup_steps=0))
        for profile in ("gpu", "paper"):
            EXPERIMENTS["healing_training"](tiny_profile(profile, folder))
        EXPERIMENTS["reuse_training"](tiny_profile("gpu", folder))
        yield made


def passages(split: str) -> list[tuple[str, str]]:
    """Forty passages a split, and a question about each."""
    return [(f"In {split} the house number {i} stands in the wind.", f"is house {i} in it?") for i in range(40)]


@pytest.mark.parametrize(("name", "profile"), CASES, ids=lambda part: part)
def test_an_experiment_runs(name, profile, world):
    found = world.summary(name, profile)
    claims = [claim for claim in load_claims(paths.CLAIMS, EXPERIMENTS) if claim.experiment == name]
    asked = {measure for claim in claims if profile in (claim.profiles or EVERY_PROFILE) for measure in claim.measures}
    assert asked - found.keys() == set(ABSENT.get((name, profile), ()))


ABSENT: dict[tuple[str, str], tuple[str, ...]] = {}
