"""Every experiment of every profile runs to its summary, on tiny shapes that keep the profile's own relations.

One rule makes them: layers, of models and of what is cut from them, are a quarter; lengths in tokens and the models'
contexts a 32nd; of what is counted there are 2 at most, and it is done once; models have no width. Trials run in this
process, nothing is read or fetched, and what the claims ask must then be in the summaries.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swarms import Here, copied
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from firsttoken.assets import corpora, models, needs, shapes
from firsttoken.assets.qa_files import QAItem
from firsttoken.chunked import bench
from firsttoken.chunked.aiperf import PeerLoad
from firsttoken.chunked.experiments import changing_load, live_peer, pipeline_bubbles, simulator_error
from firsttoken.chunked.hardware import Hardware
from firsttoken.chunked.peers import PeerModel
from firsttoken.crosspoint.experiments import online
from firsttoken.engine.costs.batches import BatchCosts
from firsttoken.engine.native.library import kernels
from firsttoken.engine.workload import sharegpt
from firsttoken.engine.workload.conversations import Conversations
from firsttoken.kvreuse.experiments import gating, methods, profiling, setting, transfer
from firsttoken.kvreuse.experiments import training as reuse_training
from firsttoken.kvreuse.experiments.speedups import TimeShares
from firsttoken.kvreuse.profile.pareto import Profiled
from firsttoken.kvreuse.tasks.items import TaskItem
from firsttoken.progressive import examination, training
from firsttoken.progressive.coldstart import deferral, harness, materials, precision, trial
from firsttoken.progressive.coldstart import experiments as coldstart
from firsttoken.progressive.planes import frontier
from firsttoken.progressive.planes.native import merger
from firsttoken.progressive.recipe import RECIPES
from firsttoken.progressive.recovery import timeline_trial
from firsttoken.registry import EXPERIMENTS
from firsttoken.study import paths, stats
from firsttoken.study.claims import load_claims
from firsttoken.study.experiment import EVERY_PROFILE
from firsttoken.study.foreign.yaml_text import read_yaml
from firsttoken.study.profile import Profile, load_profile
from firsttoken.study.record import Result
from firsttoken.together.borrowed import experiment as borrowed
from firsttoken.together.borrowed import trial as borrowed_trial

SHORTER, FEWER = 32, 4
LENGTHS = {"story_tokens", "tokens", "window_tokens", "max_tokens", "max_prompt_tokens", "prompt_tokens", "new_tokens"}
LENGTHS |= {"contexts", "context_tokens", "continue_tokens", "sweep_tokens"}
COUNTS = {"passages", "items", "eval_items", "windows", "prompts", "closed_book", "calibration", "calibration_passages"}
COUNTS |= {"stories", "watch_questions", "watch_windows", "search_windows", "steps", "clients", "readers"}
AGAIN = {"rounds", "few_rounds", "repeats", "recomputes", "runs", "trials", "draws", "seeds", "copy_mib", "disk_mib"}
AGAIN |= {"starts", "few_starts"}
FIXED = {"resamples": 20, "matmul_n": 64, "duration_s": 0.6, "sample_s": 0.05, "preemptions": 10, "short": 4, "long": 4}
LAYERS = {"distance": {"max_block", "block"}, "served": {"block_start", "block_size"}, "shapes": {"blocks"}}
LAYERS |= {"one_engine": {"block_start", "block_end", "group_start", "group_end"}}
LAYERS |= {
    "deferral": {"sizes"},
    "transitions": {"layers", "transitions"},
    "latency": {"layers"},
    "privacy": {"depths"},
}
SMALL = {
    "capacity": {"requests": 6},
    "pipeline": {"requests": 6},
    "serving": {"requests": 6},
    "changing_load": {"rate": 1.0, "phase_s": 2.0},
    "batch_cost": {"prompt": 16, "pieces": [4, 8], "tile": 6, "contexts": [4]},
    "eight_bits": {"batches": [1, 2], "context": 4},
    "chains": {"forwards": [1, 2], "forward_tokens": 4, "disk_repeats": 1, "clients": 8, "block_hidden": 128},
    "churn": {"servers": 12, "depth": 12, "events": 2},
    "one_engine": {"sessions": 2, "session_tokens": 32, "session_new_tokens": 40, "beside_tokens": 100, "sharing": 2}
    | {"gbit_per_s": 10.0, "stored_tokens": 32, "shared_tokens": 32},
    "survival": {
        "tokens": 5,
        "prompt_tokens": 8,
        "servers": 3,
        "delay_ms": 1,
        "positions": [2],
        "faults": ["kill", "cut"],
    },
    "swarm_tuning": {
        "rows": 2,
        "tokens": 8,
        "steps": 2,
        "rank": 1,
        "prompt_tokens": 2,
        "chains": [1, 3],
        "rounds": 1,
        "threads": 1,
    },
    "transport": {"tokens": 4, "prompt_tokens": 8, "chains": [1, 3]},
    "borrowed": {"tokens": 4, "main_rounds": 2, "busy_rounds": 1, "alone_s": 0.2},
    "validation": {"tokens": 3, "prompt_tokens": 4, "servers": 2, "batches": [1], "lies": ["noise"], "rates": [0.1, 1]},
    "privacy": {"train_windows": 4, "windows": 2, "batch": 2},
    "live_peer": {"prompt_spread": 4},
    "stalls": {"context": 2, "before": 2, "prompt": 32, "new_tokens": 4},
}
CASES = [(name, profile) for name, experiment in EXPERIMENTS.items() for profile in experiment.profiles]


def shorter(value: Any) -> Any:
    """A length by the rule; of several the shortest and the longest."""
    if isinstance(value, list):
        return list(dict.fromkeys(shorter(one) for one in (value[0], value[-1])))
    return max(2, value // SHORTER)


def fewer(value: Any, section: str = "") -> Any:
    """Layers, or several numbers of them, by the rule; 0 stays 0."""
    if not isinstance(value, list):
        return value and max(1, value // FEWER)
    each = [fewer(one) for one in value]
    return [max(2, one) for one in each] if section == "shapes" else list(dict.fromkeys(each))  # B and C have one each


def scaled(section: str, key: str, value: Any) -> Any:
    """One entry of a profile by the rule."""
    if key in SMALL.get(section, {}):
        return SMALL[section][key]
    if key == "runs" and isinstance(value, list):
        value = [re.sub(r"(\d+) tokens", lambda found: f"{shorter(int(found[1]))} tokens", run) for run in value]
        return [re.sub(r"groups of (\d+)", lambda found: f"groups of {fewer(int(found[1]))}", run) for run in value]
    if key == "cuts":
        first = [
            re.sub(r"(\d+):\d+", lambda found: f"{fewer(int(found[1]))}:{fewer(int(found[1])) + 1}", cut)
            for cut in value
        ]
        return list(dict.fromkeys(first))
    if section == "reuse_training" and key == "adapters":
        return [re.sub(r"\d+$", "1", adapter) for adapter in value]
    if key in LAYERS.get(section, ()):
        return fewer(value, section)
    if key in LENGTHS:
        return shorter(value)
    if key in COUNTS or key in AGAIN:
        return min(value, 2 if key in COUNTS else 1)
    if key == "cases":
        return list(dict.fromkeys(f"{case.split()[0]} 4" for case in value))
    if key == "systems":
        return [name for name in value if name != "vllm"]  # has an environment of its own
    return FIXED.get(key, value)


def tiny_profile(name: str, folder: Path) -> Profile:
    """The profile ``name`` by the rule, on a CPU, with adapters below ``folder``."""
    content = read_yaml(paths.PROFILES / f"{name}.yaml")
    sections = {key: value for key, value in content.items() if isinstance(value, dict)}
    sections["quality"].setdefault("max_prompt_tokens", examination.QualityConfig.max_prompt_tokens)
    overrides: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
    for section, entries in sections.items():
        overrides |= {f"{section}.{key}": scaled(section, key, value) for key, value in entries.items()}
    for key in ("served.adapters", "reuse.adapters"):
        section, _, entry = key.partition(".")
        overrides[key] = str(folder / "adapters" / sections[section][entry])
    live = sections["live_policies"]  # a pool of 8 blocks, lengths in proportion: requests must outgrow a block
    overrides |= {"live_policies.scale": 8 * live["scale"] / live["blocks"], "live_policies.blocks": 8}
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
    found = profiled_groups(rows)
    depth = max(len(one.group) for one in found)
    return [
        dataclasses.replace(one, own=(1.0,) * len(one.own), mixed=(0.5 + len(one.group) / depth / 2,) * len(one.own))
        for one in found
    ]


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


def in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A trial without a process of its own; there is no other command."""
    if command[:2] != [sys.executable, "-m"]:
        raise FileNotFoundError(command[0])
    if command[2] == borrowed.TRIAL:
        told = json.loads(command[-1]) | {"spawned_s": trial.INTERPRETER_UP, "gbit_per_s": 0.0, "cores": ()}
        answer: Any = {"variant": told["variant"]} | borrowed_trial.main(borrowed_trial.BorrowSpec(**told))
    elif command[2].endswith("timeline_trial"):
        answer = timeline_trial.main(timeline_trial.TimelineSpec(**json.loads(options["input"])))
    else:
        spec = trial.TrialSpec(**json.loads(command[-1]) | {"spawned_s": trial.INTERPRETER_UP, "gbit_per_s": 0.0})
        answer = {"variant": spec.variant} | trial.main(spec)
    return subprocess.CompletedProcess(command, 0, json.dumps(answer), "")


def asked_peer(system: str, model: PeerModel, budget: int, load: PeerLoad) -> dict[str, float]:
    """What a client would have seen of a server of a model that is there; either has an environment of its own."""
    assert (model.folder / "tokenizer.json").is_file() and load.prompt_tokens < model.longest
    return {column: 1.0 + budget for column, _, _ in live_peer.METRICS.values()}


@contextmanager
def lender(folder: Path, depth: int, *_: Any) -> Iterator[str]:
    """A warm neighbour in this process."""
    with closing(Here(folder)) as here:
        yield here.serve((0, depth))[0].record.address


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


class World:
    """Tiny models and made-up data in place of all that profiles name; each experiment is run once for one setting."""

    def __init__(self, folder: Path, truth: Any) -> None:
        self.folder, self._truth = folder, truth
        self._ran: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []

    def model(self, spec: str, *_: Any) -> Path:
        """The folder of a model that is ``spec`` by the rule."""
        folder = self.folder / "models" / re.sub(r"\W", "-", spec)
        if not folder.is_dir():
            torch.manual_seed(len(spec))
            config = self._truth.config(spec)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            bytes_tokenizer().save_pretrained(folder)
        return folder

    def summary(self, name: str, profile: str) -> dict[str, Any]:
        """What the experiment gives under the profile; the same settings need no second run."""
        made = tiny_profile(profile, self.folder)
        for what, model, sections, summary in self._ran:
            if (what, model) == (name, made.model) and all(made.sections.get(k) == v for k, v in sections.items()):
                return summary
        read = [self.result(source, profile) for source in EXPERIMENTS[name].reads]
        outcome = EXPERIMENTS[name](made, *read)
        summary = EXPERIMENTS[name].summarise(outcome.rows, made.parameters())
        assert summary or name == "reuse_training"
        json.dumps(outcome.rows, default=lambda value: value.item())
        self._ran.append((name, made.model, {key: made.sections[key] for key in made.used}, summary))
        return summary

    def result(self, name: str, profile: str) -> Result:
        """What another experiment reads of this one."""
        made = tiny_profile(profile, self.folder)
        rows, parameters = EXPERIMENTS[name](made).rows, made.parameters()
        return Result(name, profile, parameters, {"slug": "there"}, {}, "", [], "", 0.0, {}, rows, {}, {})


@pytest.fixture(scope="module")
def world(truth: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    made = World(folder, truth)
    AutoModelForCausalLM.from_config(shapes.shape_config("tiny"))  # for its imports
    with copied(folder / "warm"), pytest.MonkeyPatch.context() as patch:
        narrow = {
            name: (kind, (-(-depth // FEWER), 32, 64, 4, 2, 257, context // SHORTER, *rest))
            for name, (kind, (depth, _, _, _, _, _, context, *rest)) in shapes._SHAPES.items()
        }
        patch.setattr(shapes, "_SHAPES", narrow)
        for spec in truth.models:  # now: a config may be asked for where everything is built on the meta device
            made.model(spec)
        for compiled in (kernels, merger):  # once a process: not where there seems to be no compiler, or an empty cache
            compiled()
        patch.setattr(paths, "CACHE", folder / "cache")
        patch.setattr(subprocess, "run", in_this_process)
        resampled = stats._resampled  # 2,000 draws of each of some hundred measures would be most of the time
        patch.setattr(stats, "_resampled", lambda sample, stat, _, rng: resampled(sample, stat, 20, rng))
        patch.setattr(harness, "available", lambda folder: None)
        patch.setattr(harness, "KernelLimit", NoLimit)
        patch.setattr(borrowed, "warm_neighbour", lender)
        patch.setattr(borrowed, "shaped", lambda address, *_: nullcontext(address))
        patch.setattr(borrowed, "own_request", lambda *_: nullcontext(Busy()))
        for place in (coldstart, deferral, precision):
            patch.setattr(place, "disk_speed", lambda read: 100.0)
        for place in ("converted", "_from_hub"):
            patch.setattr(models, place, made.model)
        for place in (needs, examination, training, materials):
            patch.setattr(place, "load_qa", questions)
        for place in (corpora, training):
            patch.setattr(place, "boolq_prompts", passages)
        for place in (setting, reuse_training):
            patch.setattr(place, "load_items", items)
        patch.setattr(frontier, "story_model", lambda: AutoModelForCausalLM.from_config(shapes.shape_config("tiny")))
        patch.setattr(setting, "held_out", lambda task: {})
        for place in (profiling, methods, gating, transfer):
            patch.setattr(place, "profiled_groups", plausible)
        patch.setattr(methods, "times_here", lambda: TimeShares(timed(), 64))
        patch.setattr(gating, "TOKENS", shorter(gating.TOKENS))
        for place in (sharegpt, online):
            patch.setattr(place, "conversations", few_conversations)
        patch.setattr(Hardware, "read", lambda hardware: BatchCosts())
        for place in (bench, changing_load, pipeline_bubbles):
            patch.setattr(place, "lengths", lambda source: np.array([[30, 8], [60, 12]] * 10))
        patch.setattr(bench, "capacity", lambda serve, objective, *, start: (start, serve(start)))
        patch.setattr(live_peer, "turn", asked_peer)
        patch.setattr(simulator_error, "brought", lambda name: folder)
        served = {"input_toks": 9, "output_toks": 3, "queued_ts": 5.0, "first_token_ts": 5.5, "last_token_ts": 6.5}
        (folder / "vllm_requests.jsonl").write_text(json.dumps(served), encoding="utf-8")
        for name, recipe in list(RECIPES.items()):
            patch.setitem(RECIPES, name, dataclasses.replace(recipe, steps=1, accumulate=1, warmup_steps=0))
        for profile in ("gpu", "paper"):
            EXPERIMENTS["healing_training"](tiny_profile(profile, folder))
        EXPERIMENTS["reuse_training"](tiny_profile("gpu", folder))
        yield made


def passages(split: str) -> list[tuple[str, str]]:
    """Forty passages a split, and a question about each."""
    return [(f"In {split} the house number {i} stands in the wind.", f"is house {i} in it?") for i in range(40)]


SMALLER = {  # by the rule there are fewer transitions, whose number is in the name, and no copies of 1,024 tokens
    *("deviation_3", "per_block_of_memcpy", "coalesced_of_memcpy"),
    *("kl_kept_256", "kl_coarse_256"),  # contexts are shorter
    "linear_8_pct",  # models have a quarter of their layers
    *("live_pieces_128_x", "live_together_128_over_apart_x"),  # and pieces
}
LEFT_OUT = {  # of the quick profile: more links, a second task
    "four_links_over_expected_1gbit_each",
    *(f"{kind}_over_own_points" for kind in ("worst", "mean", "same_size_worst")),
}


@pytest.mark.parametrize(("name", "profile"), CASES, ids=lambda part: part)
def test_an_experiment_runs(name, profile, world):
    found = world.summary(name, profile)
    claims = [claim for claim in load_claims(paths.CLAIMS, EXPERIMENTS) if claim.experiment == name]
    asked = {measure for claim in claims if profile in (claim.profiles or EVERY_PROFILE) for measure in claim.measures}
    assert asked - found.keys() <= SMALLER | (LEFT_OUT if profile == "quick" else set())
