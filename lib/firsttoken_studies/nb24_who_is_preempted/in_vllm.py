"""Who is preempted inside vLLM: rules of the plugin on the draws of conversations, a turn each, on this machine."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import ModelFacts, check
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.engine.preemption.victims import victim_named
from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken_studies.cps.live_loads import POOL, LiveLoadsConfig
from firsttoken_studies.nb20_the_engine.throughput import VLLM_PYTHON
from firsttoken_studies.nb24_who_is_preempted.study import IN_TIME_S, STARVED_S
from firsttoken_studies.nb24_who_is_preempted.vllm_turns import BLOCK_TOKENS
from firsttoken_studies.record.results import Outcome, Rows


@dataclass(frozen=True)
class VllmVictimsConfig(LiveLoadsConfig):
    """Settings of the turns: each of ``victims`` on each of the draws from ``first_seed`` on, in random order, under
    recompute; preempted requests come back by arrival. A step has ``token_budget`` tokens at most, and a block of
    ``blocks`` 16."""

    victims: tuple[str, ...]
    first_seed: int
    token_budget: int

    section: ClassVar[str] = "league_vllm"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.victims:
            victim_named(name)


def league_vllm(profile: Profile) -> Outcome:
    """Rows as of ``study.measured_live``, the scheduler vLLM's. Raises FirstTokenError without vLLM's environment.

    Tokens are not compared, as in bfloat16 another batch can mean another token; the plugin's tests do so in float32.
    """
    config = profile.section("league_vllm", VllmVictimsConfig)
    check(config.needs(), ModelFacts(profile.model, {POOL: config.blocks * 16}))
    loaded, first_seed = load_model(profile.model, dtype=profile.torch_dtype()), profile.seed + config.first_seed
    seeds = list(range(first_seed, first_seed + config.seeds))
    loads = config.loads(loaded, seeds)
    order = list(product(seeds, config.victims))
    random.Random(profile.seed).shuffle(order)
    items = [[{"prompt": item.prompt, "output_tokens": item.output_tokens} for item in loads[seed]] for seed in seeds]
    job = {"dtype": str(profile.torch_dtype()).removeprefix("torch."), "token_budget": config.token_budget}
    job |= {"blocks": config.blocks * 16 // BLOCK_TOKENS, "loads": items}
    job["turns"] = [(seeds.index(seed), victim) for seed, victim in order]
    with tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="vllm-") as above:
        folder = Path(above) / "model"
        with quiet_transformers():
            loaded.model.save_pretrained(folder)
        version, *reports = answered(job | {"model": str(folder)}, Path(above), 1 + len(order))
    runs = {turn: seen(report) for turn, report in zip(order, reports, strict=True)}
    labels = {"blocks": config.blocks, "scheduler": "vllm", "recovery": "recompute", "order": "in_order"}
    rows: Rows = []
    for victim in config.victims:
        lists = {name: [round(runs[seed, victim][name], 4) for seed in seeds] for name in runs[order[0]]}
        rows.append(labels | {"victim": victim, "seeds": seeds} | lists)
    return Outcome(rows, provenance=loaded.provenance.as_dict() | version)


def answered(job: dict[str, Any], folder: Path, lines: int) -> list[dict[str, Any]]:
    """The lines that vLLM answers to ``job``. Raises FirstTokenError without its environment, and with the last error
    of its log where it fails."""
    if not VLLM_PYTHON.exists():
        raise FirstTokenError("league_vllm: vLLM's environment is missing; run env/vllm/setup.sh")
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [str(VLLM_PYTHON), "-m", "firsttoken_studies.nb24_who_is_preempted.vllm_turns", str(folder / "job.json")]
    environment, log = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}, folder / "log.txt"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        with process:
            answers = (json.loads(line) for line in process.stdout if line.startswith("{"))
            reports = [next(answers, None), *(next(answers, None) for _ in track(range(lines - 1), desc="vLLM"))]
    if None in reports or process.returncode:
        why = [line for line in log.read_text("utf-8").splitlines() if "Error" in line] or ["no reason given"]
        raise FirstTokenError(f"league_vllm: vLLM failed: {why[-1]}")
    return reports


def seen(report: dict[str, Any]) -> dict[str, float]:
    """Return the measures of ``study.MEASURES`` that clients of vLLM see, of one turn."""
    first_s = np.array([times[0] for times in report["times_s"]])
    gaps_s = np.array([np.diff(times).max(initial=0.0) for times in report["times_s"]])
    tpot_s = [(times[-1] - times[0]) / (len(times) - 1) for times in report["times_s"] if len(times) > 1]
    return {
        "p99_tpot_ms": float(np.percentile(tpot_s, 99)) * 1e3,
        "mean_ttft_ms": float(first_s.mean()) * 1e3,
        "p99_ttft_ms": float(np.percentile(first_s, 99)) * 1e3,
        "in_time_pct": 100 * float(((first_s <= IN_TIME_S[0]) & (gaps_s <= IN_TIME_S[1])).mean()),
        "longest_gap_s": float(gaps_s.max()),
        "starved": float((gaps_s > STARVED_S).sum()),
        "preemptions": float(report["preemptions"]),
    }
