"""What becomes of running requests in llama.cpp's server when its KV cache is full."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from firsttoken.assets.lock import asset_path
from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.probes.programs import free_port, started, wait_healthy
from firsttoken_studies.record.results import Outcome, Rows, frame_of

CACHES = "unified", "split", "shifted"  # one for all slots, a part for each, the same with context shift
ENDINGS = "whole", "cut", "failed"
PYTHON, FILE = paths.ROOT / ".venv-clients" / "bin" / "python", "smollm2-135m-instruct.q4_1.gguf"
SERVER = """
import signal, sys, xllamacpp
options, cache = xllamacpp.CommonParams(), sys.argv[5]
options.model.path, options.port, options.n_parallel, options.n_ctx = sys.argv[1], *map(int, sys.argv[2:5])
options.kv_unified, options.ctx_shift, options.warmup, options.fit_params = cache == "unified", cache == "shifted", 0, 0
server = xllamacpp.Server(options)
signal.pause()
"""


@dataclass(frozen=True)
class LlamaConfig:
    """``seeds`` draws from ``first_seed`` on of ``requests`` at once, each with a slot of its own: prompts between the
    two of ``prompt`` random tokens, answers of ``answer`` tokens. Each of ``caches`` has ``context`` tokens in all."""

    first_seed: int
    seeds: int
    requests: int
    prompt: tuple[int, int]
    answer: int
    context: int
    caches: tuple[str, ...]

    def __post_init__(self) -> None:
        if absent := next((cache for cache in self.caches if cache not in CACHES), ""):
            raise ProfileError(f"llama_full: no cache {absent!r}; {unknown(absent, CACHES)}")
        if self.prompt[1] >= self.context // self.requests:
            raise ProfileError("llama_full: a prompt must fit into a slot's part of context; make it shorter")


def llama_full(profile: Profile) -> Outcome:
    """Rows {cache, seed, prompt_tokens, said_tokens, ending: one of ``ENDINGS``, forgot: whether the beginning of its
    text was dropped on the way}, one a request. Raises FirstTokenError without the environment of llama.cpp."""
    config, rows = profile.section("llama_full", LlamaConfig), []
    if not PYTHON.exists():
        raise FirstTokenError("llama_full: llama.cpp's environment is missing; run env/clients/setup.sh")
    cases = [(profile.seed + config.first_seed + n, cache) for n, cache in product(range(config.seeds), config.caches)]
    for seed, cache in track(cases, desc="llama.cpp"):
        rows += [{"cache": cache, "seed": seed} | end for end in ends_of(config, cache, seed)]
    return Outcome(rows, provenance={"xllamacpp": version(), "file": FILE})


def ends_of(config: LlamaConfig, cache: str, seed: int) -> Rows:
    """Start a server for one draw, and return a row for each of its clients."""
    draw, port = random.Random(seed), free_port()
    prompts = [draw.choices(range(1000, 40_000), k=draw.randint(*config.prompt)) for _ in range(config.requests)]
    command = [PYTHON, "-c", SERVER, asset_path(FILE), port, config.requests, config.context, cache]
    with tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="llama-") as folder:
        log = Path(folder) / "log.txt"
        with started(list(map(str, command)), log, os.environ) as process:
            wait_healthy(process, port, 60.0, log, "llama_full: llama.cpp's server")
            with ThreadPoolExecutor(config.requests) as clients:
                return list(clients.map(partial(asked, port, config.answer), prompts))


def version() -> str:
    """The version of xllamacpp, whose last number is llama.cpp's."""
    ask = "import importlib.metadata as m; print(m.version('xllamacpp'))"
    return subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def asked(port: int, answer: int, prompt: list[int]) -> dict[str, Any]:
    """Send one request, and return the row of its client: the tokens of the answer, and how it ends."""
    body = {"prompt": prompt, "n_predict": answer, "ignore_eos": True, "temperature": 0, "stream": True}
    count, failed, forgot = 0, False, False
    url = f"http://127.0.0.1:{port}/completion"
    with httpx.stream("POST", url, json=body | {"return_tokens": True}, timeout=300) as response:
        failed = response.status_code != 200
        for line in response.iter_lines():
            kind, _, text = line.partition(": ")
            event = json.loads(text) if kind == "data" and text.startswith("{") else {}
            failed |= kind == "error" or "error" in event
            count += len(event.get("tokens", ()))
            forgot |= bool(event.get("truncated"))
    ending = "failed" if failed else "whole" if count >= answer else "cut"
    forgot &= ending == "whole"
    return {"prompt_tokens": len(prompt), "said_tokens": count, "ending": ending, "forgot": forgot}


def llama_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The share of requests that end so, or have lost the beginning of their text, by cache, over draws."""
    summary, draws = Summary(), frame_of(rows).groupby(["cache", "seed"], sort=False)
    shares = draws.ending.value_counts(normalize=True).unstack(fill_value=0.0).reindex(columns=ENDINGS, fill_value=0.0)
    shares = shares.assign(forgot=draws.forgot.mean())
    for cache, of_cache in shares.groupby("cache", sort=False):
        for name, values in of_cache.items():
            summary.add(f"{name}_pct", bootstrap(100 * values.to_numpy()).summary("% of the requests"), case=cache)
    return summary
