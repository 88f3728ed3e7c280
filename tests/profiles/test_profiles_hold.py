"""Every experiment of every profile gets past its own checks with the true sizes of models, data and devices.

Where the first weight would be loaded it is stopped. Sizes that cannot hold are refused in one line that names the key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from firsttoken.assets import models, needs
from firsttoken.progressiveserve.base_model import ServedConfig
from firsttoken.study.errors import ModelError, ProfileError
from firsttoken.study.profile import Profile, load_profile
from firsttoken_studies.droidspeak import setting
from firsttoken_studies.droidspeak.setting import HELD_OUT, ReuseConfig, Run
from firsttoken_studies.nb13_cold_start import study as coldstart
from firsttoken_studies.nb15_recovery_timeline import study as timeline
from firsttoken_studies.nb22_cross_point_scheduler import study as policy_comparison
from firsttoken_studies.nb23_online_cross_point import study as learnt_threshold
from firsttoken_studies.nb33_latency_and_quality import reuse_methods
from firsttoken_studies.record.results import Result
from firsttoken_studies.registry import EXPERIMENTS

ASKS_NOTHING = {
    "machine",
    "sizes",
    "environment",
    "serving_capacity",
    "pipeline_bubbles",
    "simulator_error",
    "operator_error",
    "host_time",
    "mixture_error",
    "card_capacity",
    "paper_capacity",
    "objective_sweep",
    "fixed_load",
    "reports_on_cards",
    "victims",
    "proposals",
    "llama_full",
    "second_card",
    "two_cards",
    "chunk_error",
    "swarm_churn",
}  # of a model or of data
CASES = [
    (name, profile)
    for name, experiment in EXPERIMENTS.items()
    for profile in experiment.profiles
    if name not in ASKS_NOTHING
]

AUTO = ("quick", "review", "full")  # profiles whose dtype is the processor's: float32 is twice the bytes

weighed = functools.cache(needs.weight_bytes)  # a second for 8B, and many ask


class Reached(Exception):
    """The checks are passed: here the work would begin."""


@pytest.fixture(autouse=True)
def true_world(truth: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models of the true shapes that cannot be loaded, data of the true sizes that cannot be read."""

    def stop(*_: Any, **__: Any) -> None:
        raise Reached

    def held(self: needs.ModelFacts, of: str) -> int | None:
        config = truth.config(self._model)
        facts = {needs.LAYERS: config.num_hidden_layers, needs.CONTEXT: config.max_position_embeddings}
        return (facts | truth.held | self._more).get(of)

    for place in (setting, timeline):
        monkeypatch.setattr(place, "weight_bytes", weighed)
    monkeypatch.setattr(needs.ModelFacts, "get", held)
    monkeypatch.setattr(needs, "model_config", truth.config)
    monkeypatch.setattr(setting, "held_out", lambda task: {HELD_OUT: truth.longbench} if "." in task else {})
    for name in ("_random", "_from_folder"):
        monkeypatch.setattr(models, name, stop)
    for name in ("_from_hub", "converted", "model_files", "check_tensors"):
        monkeypatch.setattr(models, name, lambda *_: tmp_path)
    monkeypatch.setattr(ServedConfig, "check_adapters", lambda *_: None)
    monkeypatch.setattr(coldstart, "random_checkpoint", stop)
    monkeypatch.setattr(policy_comparison, "threshold_mix", stop)
    monkeypatch.setattr(learnt_threshold, "conversations", stop)
    monkeypatch.setattr(reuse_methods, "times_here", lambda: None)  # known where prefill_latency was measured


@pytest.fixture
def on_cpu(truth: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Profile]:
    """Makes a profile whose GPU is replaced by a CPU that has the memory of the GPU."""

    def make(name: str, **overrides: object) -> Profile:
        monkeypatch.setattr(setting, "device_memory", lambda device: truth.device_bytes[name])
        return load_profile(name, **({"device": "cpu", "dtype": "bfloat16"} | overrides))

    return make


@pytest.mark.parametrize(
    ("name", "profile", "dtype"),
    [(*case, "bfloat16") for case in CASES] + [(*case, "float32") for case in CASES if case[1] in AUTO],
    ids=lambda part: part,
)
def test_an_experiment_gets_to_its_work(name, profile, dtype, on_cpu):
    read = (timed(source, load_profile(profile)) for source in EXPERIMENTS[name].reads)
    with pytest.raises(Reached):
        EXPERIMENTS[name](on_cpu(profile, dtype=dtype), *read)


@pytest.mark.parametrize("name", [name for name, profile in CASES if profile == "quick"])
@pytest.mark.parametrize("profile", ["quick", "full"])
def test_it_gets_there_with_a_model_that_has_settings_of_its_own(name: str, profile: str, on_cpu) -> None:
    if profile not in EXPERIMENTS[name].profiles:
        pytest.skip("this profile has no such experiment")
    made = on_cpu(profile, model="qwen2.5-coder-0.5b")
    read = (timed(source, made) for source in EXPERIMENTS[name].reads)
    with pytest.raises((Reached, ModelError)) as stopped:
        EXPERIMENTS[name](made, *read)
    untrained = r"^'[\w-]+' is no adapter in .*qwen2.5-coder-0.5b/reuse and no model; train it \(.* reuse_training\)"
    assert stopped.type is Reached or stopped.match(untrained)


def timed(source: str, profile: Profile) -> Result:
    """A result of ``source`` whose rows have nothing but the lengths of the profile."""
    assert source == "prefill_latency"
    rows = [{"tokens": tokens} for tokens in profile.sections["latency"]["tokens"]]
    parameters = {"model": profile.model, "latency": profile.sections["latency"]}
    return Result(source, profile.name, parameters, {"slug": "there"}, {}, "", [], "", 0.0, {}, rows, {}, {})


@pytest.mark.parametrize("profile", ["quick", "full", "gpu"])
def test_constructed_tasks_hold_the_items_of_every_run(profile, truth):
    config = load_profile(profile).section("reuse", ReuseConfig)
    for run in map(Run.parse, config.runs):
        assert config.items + config.eval_items <= truth.constructed[run.task, run.tokens]


PAIR = "meta-llama/Llama-3.1-70B-Instruct <- meta-llama/Llama-3.1-70B: hotpotqa.jsonl, 16384 tokens"
FAULTS = {
    "a window of the longest context for every continuation": (
        "open_session",
        "gpu",
        {"open_session.context_tokens": 4049},
        r"open_session\.windows .*: 196,656 tokens of text, test are asked for, there are 169,549; lower it",
    ),
    "more layers than the timed model has": (
        "prefill_latency",
        "paper",
        {"latency.model": "", "latency.tokens": [4092], "latency.layers": [0, 16, 40, 80]},
        r"latency\.layers: 80 layers of meta-llama/Llama-2-7b-hf are asked for, there are 32; ask for fewer",
    ),
    "16k tokens of a context of 4k": (
        "prefill_latency",
        "paper",
        {"latency.model": ""},
        r"latency\.tokens: 16,388 tokens of context of meta-llama/Llama-2-7b-hf are asked for, there are 4,096; ask",
    ),
    "the same, drawn at random": (
        "prefill_latency",
        "gpu",
        {"latency.model": "random:llama-2-7b"},
        r"latency\.tokens: 16,388 tokens of context of random:llama-2-7b are asked for, there are 4,096; ask",
    ),
    "a pair that no GPU holds": (
        "layer_profile",
        "paper",
        {"reuse.runs": [PAIR]},
        r"reuse\.runs: 282,[\d,]+ bytes of memory of the device are asked for, there are 85,.*name smaller models",
    ),
    "more items than a task holds out": (
        "layer_profile",
        "paper",
        {"reuse.eval_items": 80},
        r"reuse\.items \+ eval_items: 130 held-out items of .*hotpotqa are asked for, there are 112; lower it",
    ),
    "a block that the model has no layers for": (
        "stage_quality",
        "quick",
        {"served.block_start": 23},
        r"served\.block_start \+ block_size: 31 layers of smollm2-135m are asked for, there are 30; move the block",
    ),
    "more questions than the test split has": (
        "stage_quality",
        "full",
        {"quality.items": 300},
        r"quality\.items: 300 test questions of sciq are asked for, there are 259; lower it",
    ),
    "runs of layers with no reused one between them": (
        "transitions",
        "quick",
        {"transitions.layers": 28},
        r"transitions\.layers .*: 32 layers of smollm2-135m are asked for, there are 30; lower it",
    ),
    "answers that no context holds": (
        "reuse_throughput",
        "full",
        {"serving.output_tokens": 6145},
        r"serving\.output_tokens: 8,193 tokens of context of smollm2-135m are asked for, there are 8,192; lower it",
    ),
    "a threshold that no pool holds": (
        "crosspoint_replayed",
        "full",
        {"replayed.thresholds": [16384]},
        r"replayed\.thresholds: 16,384 tokens in all of its KV blocks .*, there are 8,192; lower it, or raise replay",
    ),
    "conversations that no pool holds": (
        "crosspoint_live",
        "full",
        {"live_policies.blocks": 31},
        r"live_policies\.scale: 512 tokens in all of its KV blocks .*, there are 496; lower it, or raise live_po",
    ),
    "clients that leave before the model is there": (
        "recovery_timeline",
        "paper",
        {"timeline.duration_s": 60},
        r"timeline\.duration_s: the whole model takes 108 s over 1 Gbit/s and the clients leave after 60: raise it",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_size_that_cannot_hold_is_refused_before_any_work(fault, on_cpu):
    name, profile, overrides, message = FAULTS[fault]
    read = [timed(source, load_profile(profile)) for source in EXPERIMENTS[name].reads]
    with pytest.raises(ProfileError, match=message) as caught:
        EXPERIMENTS[name](on_cpu(profile, **overrides), *read)
    assert "\n" not in str(caught.value)


def test_the_memory_of_a_device():
    assert needs.device_memory(torch.device("cpu")) > 1 << 30
