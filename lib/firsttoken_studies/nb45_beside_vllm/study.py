"""A live peer: vLLM and `firsttoken serve` with the same tokens a step, asked the same by somebody else's client.

The client is aiperf. It and vLLM run in environments of their own, behind OpenAI's interface; both servers get the same
folder, dtype, threads, memory for keys and values, and tokens a step, and neither keeps prefixes.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from firsttoken.assets.models import load_model, model_name
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.engine.kv import KVShape
from firsttoken.study import paths
from firsttoken.study.dtypes import AUTO, name_of, resolve, serving
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import errors_as
from firsttoken.study.parsing.schema import at_least, parse_as
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.nb20_the_engine.throughput import VLLM_PYTHON
from firsttoken_studies.probes.programs import free_port, last_line, started, wait_healthy
from firsttoken_studies.record.results import Outcome, Rows, frame_of

AIPERF = paths.ROOT / ".venv-clients" / "bin" / "aiperf"
EXPORT = "profile_export_aiperf.json"
WARM_UP = 3  # requests that are not counted, one after the other
_PATIENCE_S = 120.0  # for aiperf to come up and to write what it saw, beside the load itself


@dataclass(frozen=True)
class Averaged:
    """The average of a count or a rate, as aiperf exports it."""

    avg: Annotated[float, at_least(0)]


@dataclass(frozen=True)
class Milliseconds:
    """The distribution of a time over requests, as aiperf exports it."""

    unit: Literal["ms"]
    avg: float
    p50: float
    p99: float


@dataclass(frozen=True)
class AiperfExport:
    """The part of aiperf's JSON export that is used. ``inter_token_latency`` is a request's time after the first token
    over its other tokens, ``inter_chunk_latency`` every gap between two events of a stream."""

    request_count: Averaged
    input_sequence_length: Averaged
    output_sequence_length: Averaged
    output_token_throughput: Averaged
    time_to_first_token: Milliseconds
    inter_token_latency: Milliseconds
    inter_chunk_latency: Milliseconds
    request_latency: Milliseconds
    error_request_count: Averaged | None = None
    error_summary: tuple[dict[str, Any], ...] | None = None
    is_complete: bool | None = None


def aiperf_command(url: str, folder: Path, load: PeerConfig, seed: int, out: Path) -> list[str]:
    """Ask the completions of ``url`` for the model that is called after its ``folder``; the export goes to ``out``.

    The ``seed`` draws prompts, lengths and arrivals of the ``load``, for every server the same.
    """
    options = {
        "endpoint-type": "completions",
        "url": url,
        "model": folder.name,
        "tokenizer": folder,
        "request-count": load.requests,
        "num-dataset-entries": load.requests + WARM_UP,
        "request-rate": load.rate,
        "arrival-pattern": "poisson",
        "warmup-request-count": WARM_UP,
        "warmup-concurrency": 1,
        "isl": load.prompt_tokens,
        "isl-stddev": load.prompt_spread,
        "osl": load.new_tokens,
        "extra-inputs": "temperature:0",
        "random-seed": seed,
        "artifact-dir": out,
        "ui": "none",
    }
    flags = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    return [str(AIPERF), "profile", *_words(options), *flags]


def ask(command: list[str], load: PeerConfig, out: Path, environment: dict[str, str]) -> dict[str, float]:
    """Run ``command`` of :func:`aiperf_command` and return its measures. Raises FirstTokenError where it ends with an
    error, takes too long, or saw one."""
    log, patience_s = out / "aiperf.log", _PATIENCE_S + 4 * load.requests / load.rate
    with started(command, log, environment) as process:
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise FirstTokenError(f"live_peer: aiperf took more than {patience_s:.0f} s: {last_line(log)}") from None
    if code:
        raise FirstTokenError(f"live_peer: aiperf ended with {code}: {last_line(log)}")
    return answers(out / EXPORT, load.requests)


def answers(export: Path, requests: int) -> dict[str, float]:
    """Return a row's measures from aiperf's export: seconds, tokens, and tokens a second.

    Raises FirstTokenError, naming the file, where it cannot be read, and for less than ``requests`` answers without an
    error.
    """
    with errors_as(export.name, FirstTokenError, "run live_peer again with the aiperf of env/clients"):
        exported = parse_as(AiperfExport, read_json(export), others=True)
    errors = exported.error_request_count.avg if exported.error_request_count else 0
    if errors or exported.error_summary or exported.is_complete is False or exported.request_count.avg != requests:
        why = f"; the first error: {exported.error_summary[0]}"[:300] if exported.error_summary else ""
        raise FirstTokenError(
            f"live_peer: aiperf saw {exported.request_count.avg:.0f} answers to {requests} requests and {errors:.0f} "
            f"errors{why}"
        )
    times = {"ttft": exported.time_to_first_token, "itl": exported.inter_token_latency}
    times |= {"gap": exported.inter_chunk_latency, "latency": exported.request_latency}
    row = {
        f"{name}_{statistic}_s": getattr(entry, key) / 1e3
        for name, entry in times.items()
        for statistic, key in (("mean", "avg"), ("p50", "p50"), ("p99", "p99"))
    }
    return row | {
        "requests": exported.request_count.avg,
        "errors": errors,
        "prompt_tokens": exported.input_sequence_length.avg,
        "output_tokens": exported.output_sequence_length.avg,
        "tokens_per_s": exported.output_token_throughput.avg,
    }


OURS, VLLM = "ours", "vllm"
RUNNING = 64  # requests in a step at once, at most: as many as the default of `firsttoken serve`
KV_TOKENS, BLOCK_TOKENS = 32_768, 16
LONGEST_PROMPT, LONGEST_ANSWER = 2048, 512  # tokens that `firsttoken serve` takes and gives
_WAITING = 10_000  # vLLM refuses nobody who waits
_SERVER_PATIENCE_S = 300.0  # for a server to come up: vLLM compiles the model the first time


@dataclass(frozen=True)
class PeerModel:
    """A plain Hugging Face ``folder`` that the CPU computes in ``dtype`` with ``threads`` threads; a request has
    ``longest`` tokens at most, and a token ``kv_bytes`` of keys and values."""

    folder: Path
    dtype: str
    threads: int
    longest: int
    kv_bytes: int


def our_command(model: PeerModel, budget: int, port: int) -> list[str]:
    """`firsttoken serve` with ``budget`` tokens a step."""
    options = {
        "host": "127.0.0.1",
        "port": port,
        "device": "cpu",
        "token-budget": budget,
        "max-running": min(RUNNING, budget),
        "max-waiting": _WAITING,
        "kv-blocks": KV_TOKENS // BLOCK_TOKENS,
    }
    return [sys.executable, "-m", "firsttoken", "serve", str(model.folder), *_words(options)]


def vllm_command(model: PeerModel, budget: int, port: int) -> list[str]:
    """vLLM's server with ``budget`` tokens a step. Chunked prefill is its default; prompts are not kept, as ours are
    not."""
    options = {
        "model": model.folder,
        "served-model-name": model.folder.name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": model.dtype,
        "max-num-batched-tokens": budget,
        "max-num-seqs": min(RUNNING, budget),
        "max-model-len": model.longest,
        "kv-cache-memory-bytes": KV_TOKENS * model.kv_bytes,
    }
    flags = ["--no-enable-prefix-caching"]
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        flags.append("--enforce-eager")  # without a compiler it would not start
    return [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", *_words(options), *flags]


COMMANDS: dict[str, Callable[[PeerModel, int, int], list[str]]] = {OURS: our_command, VLLM: vllm_command}


@contextmanager
def served(system: str, model: PeerModel, budget: int, log: Path) -> Iterator[str]:
    """The URL of ``system`` once it answers; it is ended after the block. Raises FirstTokenError where it does not
    come up."""
    port = free_port()
    variables = environment(model.threads) | {"HF_HUB_OFFLINE": "1"}  # not for aiperf, which takes no folder then
    with started(COMMANDS[system](model, budget, port), log, variables) as process:
        wait_healthy(process, port, _SERVER_PATIENCE_S, log, f"live_peer: the server {system!r}")
        yield f"http://127.0.0.1:{port}"


def environment(threads: int) -> dict[str, str]:
    """Return the environment of both servers and their client: no keys, ``threads`` threads to compute with.

    vLLM on a CPU would bind itself to all cores but one; on two cores it would compute with half of what ours has.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    settings = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "NO_PROXY": "127.0.0.1"}
    return inherited | settings | {"VLLM_NO_USAGE_STATS": "1"}


def _words(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


Turns = list[tuple[int, int, str]]  # round, budget, system
TIMES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "gap_p99", "latency_p50")
METRICS = {name: (f"{name}_s", "s", min) for name in TIMES} | {"tokens_per_s": ("tokens_per_s", "tokens/s", max)}
"""Of each its column, its unit, and which value is the better one."""
BEST = {"case": "each at its best budget"}
CPU = "cpu"
LONGER = 4  # standard deviations above the mean that a prompt may have


@dataclass(frozen=True)
class PeerConfig:
    """``rounds`` times each of ``budgets`` (tokens a step) on either server, which is started anew for it.

    The load of a round, the same for all of its turns, is ``requests`` completions, ``rate`` a second on average with
    Poisson arrivals, of made-up prompts of ``prompt_tokens`` tokens on average and ``prompt_spread`` standard
    deviation, greedy answers of ``new_tokens`` tokens at most.
    """

    budgets: tuple[int, ...]
    requests: int
    rate: float
    prompt_tokens: int
    prompt_spread: int
    new_tokens: int
    rounds: int

    def __post_init__(self) -> None:
        counts = (*self.budgets, self.requests, self.prompt_tokens, self.rounds)
        if not self.budgets or min(counts) < 1 or self.rate <= 0 or self.prompt_spread < 0 or self.new_tokens < 2:
            raise ProfileError(
                "live_peer: budgets, requests, prompt_tokens and rounds must be at least 1, new_tokens 2, rate above 0 "
                "and prompt_spread 0"
            )
        if len(set(self.budgets)) < len(self.budgets):
            raise ProfileError("live_peer: a budget is there twice; name each once")
        if self.longest_prompt > LONGEST_PROMPT or self.new_tokens > LONGEST_ANSWER:
            raise ProfileError(
                f"live_peer: `firsttoken serve` takes {LONGEST_PROMPT} tokens and gives {LONGEST_ANSWER}; lower "
                f"prompt_tokens + {LONGER} prompt_spread = {self.longest_prompt}, or new_tokens = {self.new_tokens}"
            )

    @property
    def longest_prompt(self) -> int:
        """Tokens that a drawn prompt has at most, but for one draw of 30,000."""
        return self.prompt_tokens + LONGER * self.prompt_spread

    @property
    def longest(self) -> int:
        """Tokens of such a prompt and its answer."""
        return self.longest_prompt + self.new_tokens

    def needs(self) -> list[Need]:
        """Require a context that holds the longest prompt and its answer."""
        return [Need(f"live_peer.prompt_tokens + {LONGER} prompt_spread + new_tokens", self.longest, CONTEXT)]

    def turns(self, seed: int) -> Turns:
        """Return each budget and system in every round, in an order drawn for the round."""
        rng, pairs = random.Random(seed), [(budget, system) for budget in self.budgets for system in (OURS, VLLM)]
        return [(number, *pair) for number in range(self.rounds) for pair in rng.sample(pairs, len(pairs))]


def live_peer(profile: Profile) -> Outcome:
    """Rows {system, budget, round, order, seed, start_s, requests, errors, prompt_tokens, output_tokens, tokens_per_s,
    <metric>_<statistic>_s}.

    The metrics are aiperf's: ``ttft``, ``itl`` (a request's time after its first token over its other tokens), ``gap``
    (between two events of a stream) and ``latency`` (of a request), each with ``mean``, ``p50`` and ``p99``. Raises
    FirstTokenError where one of the environments is missing, a server does not come up, or any request fails.
    """
    config = profile.section("live_peer", PeerConfig)
    check(config.needs(), ModelFacts(profile.model))
    rows: Rows = []
    with _stored(profile, config.longest) as (model, provenance):
        turns = track(config.turns(profile.seed), desc="live peer")
        for order, (number, budget, system) in enumerate(turns):
            seed = profile.seed + number
            case = {"system": system, "budget": budget, "round": number, "order": order, "seed": seed}
            rows.append(case | turn(system, model, budget, config, seed))
    return Outcome(rows, provenance=provenance)


def turn(system: str, model: PeerModel, budget: int, load: PeerConfig, seed: int) -> dict[str, float]:
    """Start ``system``, have it asked, end it: the rest of a row of :func:`live_peer`, which see for what it raises."""
    for program, whose, mend in ((VLLM_PYTHON, "vLLM", "env/vllm"), (AIPERF, "aiperf", "env/clients")):
        if not program.exists():
            raise FirstTokenError(f"live_peer: {whose}'s environment is missing; run {mend}/setup.sh")
    with tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="peer-") as folder:
        out, start = Path(folder), time.perf_counter()
        with served(system, model, budget, out / "server.log") as url:
            start_s = time.perf_counter() - start
            command = aiperf_command(url, model.folder, load, seed, out)
            return {"start_s": start_s} | ask(command, load, out, environment(model.threads))


@contextmanager
def _stored(profile: Profile, longest: int) -> Iterator[tuple[PeerModel, dict[str, Any]]]:
    """The profile's model in a folder of its own, in the dtype that it computes in, and where it comes from.

    Both servers compute in what they find there, on the CPU whatever else there is: the pinned vLLM is built for that.
    Raises ProfileError for a model without a tokenizer.
    """
    dtype = resolve(profile.dtype, CPU)
    loaded = load_model(profile.model, dtype=dtype)
    if loaded.tokenizer is None:
        raise ProfileError(f"live_peer: {model_name(profile.model)} has no tokenizer; name a model that has one")
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="peer-") as above:
        folder = Path(above) / "model"
        with quiet_transformers():
            loaded.model.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
        served = serving(AUTO, dtype, CPU)
        kv_bytes = KVShape.of(loaded.model.config, served).bytes_per_token
        provenance = loaded.provenance.as_dict() | {"served_dtype": name_of(served)}
        del loaded  # its memory is the servers'
        yield PeerModel(folder, name_of(served), torch.get_num_threads(), longest, kv_bytes), provenance


def peer_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Medians over rounds by system and budget; ours over vLLM's, round by round, at each budget and with each at its
    own best one, that of the best median."""
    budgets, frame, summary = parameters["live_peer"]["budgets"], frame_of(rows), Summary()
    for name, (column, unit, better) in METRICS.items():
        values = frame.pivot(index="round", columns=["system", "budget"], values=column)
        for system, budget in product((OURS, VLLM), budgets):
            median = bootstrap(values[system, budget], "median").summary(unit)
            summary.add(column, median, engine=system, budget_tokens=budget)
        best = {system: better(budgets, key=values[system].median().get) for system in (OURS, VLLM)}
        for system, budget in best.items():
            summary.add(f"{name}_best_budget_tokens", {"value": budget, "unit": "tokens"}, engine=system)
        pairs = [({"budget_tokens": budget}, budget, budget) for budget in budgets]
        for labels, own_case, theirs in [*pairs, (BEST, best[OURS], best[VLLM])]:
            ratio = bootstrap(values[OURS, own_case] / values[VLLM, theirs], "median").summary("x")
            summary.add(f"{name}_x", ratio, engine=OURS, than=VLLM, **labels)
    return summary
