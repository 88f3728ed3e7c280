"""Every experiment of every profile runs to its summary, on the tiny shapes of ``tiny_profiles``.

Trials run in this process, nothing is read or fetched, and what the claims ask must then be in the summaries.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizers import a_token_a_byte
from changed_mechanisms import CHANGES, Change, rings, watched
from made_up import (
    Busy,
    NoLimit,
    asked_peer,
    by_distance,
    choice_questions,
    counted_lender,
    few_conversations,
    in_this_process,
    items,
    lending,
    passages,
    plausible,
    questions,
    short_conversations,
    timed,
    vllm_answers,
)
from swarms import servers_imported
from tiny_profiles import FEWER, SHORTER, tiny_profile
from transformers import AutoModelForCausalLM

from firsttoken.assets import corpora, models, needs, shapes
from firsttoken.engine.workload_items import Item
from firsttoken.progressiveserve import evaluation, training
from firsttoken.progressiveserve.recipe import RECIPES
from firsttoken.simulation.costs import mixture_costs
from firsttoken.simulation.costs.operator_tables import CARDS, OperatorTables
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.simulation.costs.sarathi_artifact import BatchCosts
from firsttoken.simulation.hardware import Hardware
from firsttoken.simulation.workload import sharegpt
from firsttoken.study import paths, stats
from firsttoken.study.summary import Summary
from firsttoken_cpu.native.library import kernels
from firsttoken_extras.bitplanes.native_words import merger
from firsttoken_studies import multiple_choice
from firsttoken_studies.droidspeak import setting
from firsttoken_studies.nb13_cold_start import study as coldstart
from firsttoken_studies.nb14_how_many_layers_may_wait import study as layer_sweep
from firsttoken_studies.nb17_bits_before_layers import bitplane_starts, frontier
from firsttoken_studies.nb18_what_a_draft_is_worth import burst, first_answers, waiting
from firsttoken_studies.nb18_what_a_draft_is_worth import study as drafted
from firsttoken_studies.nb23_online_cross_point import study as learnt_threshold
from firsttoken_studies.nb24_who_is_preempted import cards, elsewhere, in_llama, in_vllm, optimum
from firsttoken_studies.nb30_full_reuse_and_sensitivity import profiling
from firsttoken_studies.nb30_full_reuse_and_sensitivity import training as reuse_training
from firsttoken_studies.nb33_latency_and_quality import reuse_methods
from firsttoken_studies.nb33_latency_and_quality.reuse_methods import TimeShares
from firsttoken_studies.nb34_profile_transfer import study as profile_transfer
from firsttoken_studies.nb41_serving_capacity import bench, pipeline_bubbles
from firsttoken_studies.nb42_the_simulator_and_a_gpu import chunk_error, operators_here, simulator_error
from firsttoken_studies.nb45_beside_vllm import study as live_peer
from firsttoken_studies.nb46_on_the_stated_gpus import host_time, operator_error, paper_cards
from firsttoken_studies.nb56_a_start_that_borrows import borrowed_start as borrowed
from firsttoken_studies.nb56_a_start_that_borrows import fetch_trial
from firsttoken_studies.nb61_five_at_once import study as five
from firsttoken_studies.progressiveserve.coldstart import checkpoints, harness
from firsttoken_studies.record.claims import load_claims
from firsttoken_studies.record.experiment import EVERY_PROFILE
from firsttoken_studies.record.results import Result
from firsttoken_studies.registry import EXPERIMENTS

CASES = [(name, profile) for name, experiment in EXPERIMENTS.items() for profile in experiment.profiles]


class World:
    """Tiny models and made-up data in place of all that profiles name; each experiment is run once for one setting."""

    def __init__(self, folder: Path, truth: Any) -> None:
        self.folder, self._truth = folder, truth
        self._ran: list[tuple[str, str, dict[str, Any], Summary]] = []

    def model(self, spec: str, *_: Any) -> Path:
        """The folder of a model that is ``spec`` by the rule."""
        folder = self.folder / "models" / re.sub(r"\W", "-", spec)
        if not folder.is_dir():
            torch.manual_seed(len(spec))
            config = self._truth.config(spec)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            a_token_a_byte().save_pretrained(folder)
        return folder

    def summary(self, name: str, profile: str) -> Summary:
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

    def result(self, name: str, profile: str, **mechanisms: Any) -> Result:
        """What the experiment gives with its summary, with a reader's ``mechanisms`` where there are any."""
        made = tiny_profile(profile, self.folder)
        read = [self.result(source, profile) for source in EXPERIMENTS[name].reads]
        outcome, parameters = EXPERIMENTS[name](made, *read, **mechanisms), made.parameters()
        ran = outcome.rows, outcome.floors, EXPERIMENTS[name].summarise(outcome.rows, parameters)
        return Result(name, profile, parameters, {"slug": "there"}, {}, "", [], "", 0.0, {}, *ran)


def one_trial(serve: Any, objective: Any, *, start: float) -> Any:
    """Return, in place of a search, a rate that is lower the longer the gaps are, and what is served at it."""
    rate = start / (1 + serve(start).tbt_p99_s)
    return rate, serve(rate)


@pytest.fixture(scope="module")
def world(truth: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    made = World(folder, truth)
    with servers_imported(), pytest.MonkeyPatch.context() as patch:
        narrow = {
            name: (kind, (-(-depth // FEWER), 32, 64, 4, 2, 257, context // SHORTER, *rest))
            for name, (kind, (depth, _, _, _, _, _, context, *rest)) in shapes._SHAPES.items()
        }
        patch.setattr(shapes, "_SHAPES", narrow)
        for spec in truth.models:  # now: a config may be asked for where everything is built on the meta device
            made.model(spec)
        for compiled in (kernels, merger):  # once a process: not where there seems to be no compiler, or an empty cache
            compiled()
        servers = operator_error.server_runs()[::100]
        mixtures = operator_error.mixture_runs()[:4:3]
        for card in mixture_costs.MIXTURE_CARDS:
            mixture_costs._experts(card)
        for card in CARDS:  # now, and kept: nothing is fetched into the cache below
            OperatorTables.read(card)
        patch.setattr(operator_error, "mixture_runs", lambda: mixtures)
        patch.setattr(operators_here, "_product_s", lambda *_: 1e-5)  # of the true shape, which is no test's
        for foretelling in (operator_error, host_time):
            patch.setattr(foretelling, "server_runs", lambda: servers)
        patch.setattr(paths, "CACHE", folder / "cache")
        patch.setattr(subprocess, "run", in_this_process)
        resampled = stats._resampled  # 2,000 draws of each of some hundred measures would be most of the time
        patch.setattr(stats, "_resampled", lambda sample, stat, _, rng: resampled(sample, stat, 20, rng))
        patch.setattr(harness, "available", lambda folder: None)
        patch.setattr(harness, "KernelLimit", NoLimit)
        patch.setattr(borrowed, "warm_server", counted_lender)
        patch.setattr(borrowed, "shaped", lambda address, *_: nullcontext(address))
        patch.setattr(borrowed, "own_request", lambda *_: nullcontext(Busy()))
        patch.setattr(fetch_trial, "fetchers", lending)
        patch.setattr(five, "warm_server", counted_lender)
        patch.setattr(five, "conversations", short_conversations)
        for place in (coldstart, layer_sweep, bitplane_starts, first_answers, burst):
            patch.setattr(place, "disk_speed", lambda read: 100.0)
        for place in ("converted", "_from_hub"):
            patch.setattr(models, place, made.model)
        for place in (needs, evaluation, training, checkpoints, drafted, waiting):
            patch.setattr(place, "load_qa", questions)
        patch.setattr(drafted, "code_problems", lambda: ["def f(a):\n", "def g(a, b):\n"])
        for place in (corpora, training):
            patch.setattr(place, "boolq_prompts", passages)
        for place in (setting, reuse_training):
            patch.setattr(place, "load_items", items)
        patch.setattr(multiple_choice, "choice_items", choice_questions)
        patch.setattr(frontier, "story_model", lambda: AutoModelForCausalLM.from_config(shapes.shape_config("tiny")))
        patch.setattr(setting, "held_out", lambda task: {})
        for place in (profiling, reuse_methods, profile_transfer):
            patch.setattr(place, "profiled_groups", plausible)
        patch.setattr(profiling, "_kept", by_distance)
        patch.setattr(reuse_methods, "times_here", lambda: TimeShares(timed(), 64))
        for place in (sharegpt, learnt_threshold):
            patch.setattr(place, "conversations", few_conversations)
        patch.setattr(Hardware, "read", lambda hardware: BatchCosts())
        for place in (bench, pipeline_bubbles):
            patch.setattr(place, "lengths", lambda source: np.array([[30, 8], [60, 12]] * 10))
        for searching in (bench, paper_cards):
            patch.setattr(searching, "capacity", one_trial)
        for place in (cards, elsewhere, optimum):
            patch.setattr(place, "table_2", lambda seed: PublishedCosts(decode_s=0.03))
        patch.setattr(elsewhere, "recorded_requests", lambda load: [Item(i / 4, 900 + i, 40) for i in range(12)])
        patch.setattr(optimum, "small_load", lambda *_: [Item(0.0, 520, 160, (0,) * 520)] * 3)
        patch.setattr(live_peer, "turn", asked_peer)
        patch.setattr(in_vllm, "answered", vllm_answers)
        patch.setattr(in_llama, "PYTHON", paths.ROOT)
        patch.setattr(in_llama, "version", lambda: "0")
        patch.setattr(in_llama, "ends_of", lambda *_: [{"ending": "failed", "said_tokens": 9, "forgot": False}])
        for compared in (simulator_error, chunk_error):
            patch.setattr(compared, "downloaded", lambda name: folder)
        served = {"input_toks": 9, "output_toks": 3, "queued_ts": 5.0, "first_token_ts": 5.5, "last_token_ts": 6.5}
        (folder / "vllm_requests.jsonl").write_text(json.dumps(served), encoding="utf-8")
        points = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,32,0,0,5\n"
        (folder / "attention.csv").write_text(points, encoding="utf-8")
        split = dict.fromkeys(simulator_error.SPLIT, BatchCosts()), 100
        patch.setattr(simulator_error, "split_costs", lambda config: split)
        for name, recipe in list(RECIPES.items()):
            patch.setitem(RECIPES, name, dataclasses.replace(recipe, steps=1, accumulate=1, warmup_steps=0))
        for profile in ("gpu", "paper"):
            EXPERIMENTS["healing_training"](tiny_profile(profile, folder))
        EXPERIMENTS["reuse_training"](tiny_profile("gpu", folder))
        yield made


SMALLER = {  # claims whose places the rule's shapes have not:
    "droidspeak.contiguous",  # fewer transitions
    "cps.small-copies",  # no copies of 1,024 tokens
    "cps.cross-point-live-gpu",  # a processor copies in one memory, and nothing crosses
    "petals.local-layers",  # a quarter of the layers
    *("progressive.drafts-chat-layers", "progressive.drafts-short-layers"),  # the same
    *("sarathi.chunk-overhead-live", "sarathi.ride-along-live"),  # smaller pieces
    *("petals.overhead-8", "petals.overhead-32"),  # smaller batches
    *("progressive.planes-before-torch", "progressive.planes-before-torch-s"),  # heads too narrow for the kernels
}
LEFT_OUT = {  # of the quick profile: more links, a second task
    "progressive.paraserve-links",
    *(f"droidspeak.transfer-{kind}" for kind in ("max", "mean", "same-size")),
}


@pytest.mark.parametrize(("name", "profile"), CASES, ids=lambda part: part)
def test_an_experiment_runs(name, profile, world):
    found = world.summary(name, profile)
    unanswered = {
        claim.id
        for claim in load_claims(paths.STUDIES, EXPERIMENTS)
        if claim.experiment == name and profile in (claim.profiles or EVERY_PROFILE)
        if any(found.get(claim.measure, **where) is None for where in claim.places)
    }
    assert unanswered <= SMALLER | (LEFT_OUT if profile == "quick" else set())


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.study} {change.name}")
def test_a_changed_mechanism_moves_the_figures(change: Change, world: World) -> None:
    calls: list[str] = []
    mechanisms = {name: watched(mechanism, calls) for name, mechanism in change.mechanisms.items()}
    now, changed = world.result(change.study, "quick"), world.result(change.study, "quick", **mechanisms)
    assert calls, "the study never calls it: what is timed differs between two runs without it, too"
    object.__setattr__(now, "with_mechanism", changed)
    others = [result for name in change.reads for result in (None, world.result(name, "quick"))]
    for figure in change.figures:
        assert rings(figure(None, now, *others)), f"{figure.__name__} is as it was with the library's"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.study} {change.name}")
def test_a_mechanism_that_is_the_library_s_moves_no_figure(change: Change, world: World) -> None:
    now = world.result(change.study, "quick")
    object.__setattr__(now, "with_mechanism", now)
    others = [result for name in change.reads for result in (None, world.result(name, "quick"))]
    for figure in change.figures:
        assert not rings(figure(None, now, *others)), f"{figure.__name__} draws a difference where there is none"
