"""Tokens per second of this engine, of transformers' own two ways, and of vLLM where its environment is there."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from firsttoken.assets.models import load_model
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.engine.engine import Engine
from firsttoken.engine.experiments.recovery_latency import ratio_of_medians
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.packed import pack_linears
from firsttoken.engine.request import Sampling
from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.profile import DTYPES, Profile, unknown
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap

Prompts = list[list[int]]
VLLM_PYTHON = paths.ROOT / ".venv-vllm" / "bin" / "python"
NO_END = -1  # an end-of-text token that no model says
PAD = 0


@dataclass(frozen=True)
class ThroughputConfig:
    """``requests`` prompts of ``prompt_tokens`` (fewest, most) random ids, ``new_tokens`` greedy ones each.

    Each of ``systems`` runs ``repeats`` times in each of ``dtypes``, in random order, after a warm-up. ``vllm``: also
    vLLM, which needs its own environment (`env/vllm/setup.sh`).
    """

    systems: tuple[str, ...]

    requests: tuple[int, ...]
    prompt_tokens: tuple[int, int]
    new_tokens: int
    repeats: int
    dtypes: tuple[str, ...]
    vllm: bool


def throughput(profile: Profile) -> Outcome:
    """Rows {dtype, requests, system, repeat, tokens_per_s}: the same prompts for all, in one run."""
    config = profile.section("throughput", ThroughputConfig)
    rows: Rows = []
    for dtype in config.dtypes:
        plain, packed = (
            load_model(profile.model, dtype=DTYPES[dtype], device=profile.torch_device(), with_tokenizer=False)
            for _ in range(2)
        )
        if profile.torch_device().type == "cpu":
            pack_linears(packed.model)
        for count in config.requests:
            prompts = _prompts(count, config.prompt_tokens, plain.model.config.vocab_size, profile.seed)
            systems = {
                "generate": partial(_generate, plain.model, prompts, config.new_tokens),
                "generate_packed": partial(_generate, packed.model, prompts, config.new_tokens),
                "continuous_batching": partial(_continuous, plain.model, prompts, config.new_tokens),
                "engine": partial(_engine, plain.model, prompts, config.new_tokens),
                "engine_packed": partial(_engine, packed.model, prompts, config.new_tokens),
            }
            if odd := set(config.systems) - systems.keys():
                raise ProfileError(f"throughput: no system {min(odd)!r}; {unknown(min(odd), systems)}")
            chosen = {name: systems[name] for name in config.systems}
            case = {"dtype": dtype, "requests": count}
            rows += [case | row for row in _timed(chosen, count * config.new_tokens, config.repeats, profile.seed)]
            if config.vllm:
                rows += [case | row for row in _vllm(plain.model, prompts, dtype, config)]
    return Outcome(rows, {}, _summary(rows), plain.provenance.as_dict())


def _prompts(count: int, bounds: tuple[int, int], vocabulary: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(*bounds))] for _ in range(count)]


def _timed(systems: dict[str, Callable[[], Prompts]], tokens: int, repeats: int, seed: int) -> Rows:
    """Rows {system, repeat, tokens_per_s}; ``same_tokens`` is the share of outputs equal to those of the first one."""
    reference = next(iter(systems.values()))()
    rng, rows = random.Random(seed), []
    cases = [(repeat, name) for repeat in range(-1, repeats) for name in rng.sample(list(systems), len(systems))]
    for repeat, name in tqdm(cases, desc="throughput", disable=None):
        start = time.perf_counter()
        outputs = systems[name]()
        seconds = time.perf_counter() - start
        if repeat >= 0:
            same = sum(mine == theirs for mine, theirs in zip(outputs, reference, strict=True)) / len(reference)
            rows.append({"system": name, "repeat": repeat, "tokens_per_s": tokens / seconds, "same_tokens": same})
    return rows


def _engine(model: nn.Module, prompts: Prompts, new_tokens: int) -> Prompts:
    block_tokens = 16
    blocks = sum(-(-(len(prompt) + new_tokens) // block_tokens) for prompt in prompts)
    executor = LiveExecutor(model, blocks + len(prompts), block_tokens=block_tokens)
    try:
        requests = Engine(executor).serve([(prompt, Sampling(new_tokens), 0.0) for prompt in prompts])
    finally:
        executor.close()
    return [request.output for request in requests]


def _generate(model: nn.Module, prompts: Prompts, new_tokens: int) -> Prompts:
    """One batch, padded on the left to the longest prompt."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=PAD,
    )
    return out[:, width:].tolist()


def _continuous(model: nn.Module, prompts: Prompts, new_tokens: int) -> Prompts:
    """transformers' continuous batching, set up anew for each run, as ``generate_batch`` does.

    Its cache is as large as the prompts need: on a CPU it computes over all of it, and the default, sized by free
    memory, took three times as long.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=NO_END, pad_token_id=PAD)
    page = 32
    pages = sum(-(-(len(prompt) + new_tokens) // page) for prompt in prompts) + len(prompts)
    sized = ContinuousBatchingConfig(page_size=page, num_blocks=pages, max_batch_tokens=max(256, len(prompts)))
    with quiet_transformers():
        found = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=sized, progress_bar=False, warmup=False
        )
    return [list(found[f"req_{number}"].generated_tokens) for number in range(len(prompts))]


def _vllm(model: nn.Module, prompts: Prompts, dtype: str, config: ThroughputConfig) -> Rows:
    """Rows of vLLM, in a process and an environment of its own. Raises FirstTokenError when that fails."""
    if not VLLM_PYTHON.exists():
        raise FirstTokenError("throughput: vLLM's environment is missing; run env/vllm/setup.sh")
    with tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="prompts-") as folder:
        file = Path(folder) / "prompts.json"
        file.write_text(json.dumps(prompts), encoding="utf-8")
        command = [str(VLLM_PYTHON), "-m", "firsttoken.engine.on_vllm.throughput", "--model", model.name_or_path]
        command += ["--prompts", str(file), "--new-tokens", str(config.new_tokens), "--dtype", dtype]
        command += ["--repeats", str(config.repeats)]
        environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FirstTokenError(
            f"throughput: vLLM failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return [
        {"system": "vllm", "repeat": repeat, "tokens_per_s": rate, "version": told["vllm"]}
        for repeat, rate in enumerate(told["tokens_per_s"])
    ]


def _summary(rows: Rows) -> dict[str, dict[str, Any]]:
    """Medians, and this engine over each of the others: the packed one, and the plain one like for like."""
    measures: dict[str, dict[str, Any]] = {}
    for dtype, count in {(row["dtype"], row["requests"]): None for row in rows}:
        mine = [row for row in rows if (row["dtype"], row["requests"]) == (dtype, count)]
        rates = {name: _rates(mine, name) for name in {row["system"]: None for row in mine}}
        for name, values in rates.items():
            measures[f"{name}_{dtype}_{count}"] = bootstrap(values, "median").summary("tokens/s")
            for engine in rates.keys() & {"engine", "engine_packed"} - {name}:
                over = ratio_of_medians(rates[engine], values).summary("x")
                measures[f"{engine}_over_{name}_{dtype}_{count}"] = over
    return measures


def _rates(rows: Rows, system: str) -> Sequence[float]:
    return [row["tokens_per_s"] for row in rows if row["system"] == system]
