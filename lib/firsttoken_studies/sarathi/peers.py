"""One model behind two servers of OpenAI's interface: `firsttoken serve`, and vLLM's from its own environment.

Both get the same folder, dtype, threads, memory for keys and values, and tokens a step; neither keeps prefixes.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from firsttoken.study.errors import FirstTokenError
from firsttoken.study.system.programs import free_port, started, wait_healthy
from firsttoken_studies.engine.throughput import VLLM_PYTHON

OURS, VLLM = "ours", "vllm"
RUNNING = 64  # requests in a step at once, at most: as many as the default of `firsttoken serve`
KV_TOKENS, BLOCK_TOKENS = 32_768, 16
LONGEST_PROMPT, LONGEST_ANSWER = 2048, 512  # tokens that `firsttoken serve` takes and gives
_WAITING = 10_000  # vLLM refuses nobody who waits
_PATIENCE_S = 300.0  # for a server to come up: vLLM compiles the model the first time


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


def check_there(what: str) -> None:
    """Raises FirstTokenError where vLLM's environment is missing."""
    if not VLLM_PYTHON.exists():
        raise FirstTokenError(f"{what}: vLLM's environment is missing; run env/vllm/setup.sh")


@contextmanager
def served(system: str, model: PeerModel, budget: int, log: Path) -> Iterator[str]:
    """The URL of ``system`` once it answers; it is ended after the block. Raises FirstTokenError where it does not
    come up."""
    port = free_port()
    told = environment(model.threads) | {"HF_HUB_OFFLINE": "1"}  # not for aiperf, which takes no folder then
    with started(COMMANDS[system](model, budget, port), log, told) as process:
        wait_healthy(process, port, _PATIENCE_S, log, f"live_peer: the server {system!r}")
        yield f"http://127.0.0.1:{port}"


def environment(threads: int) -> dict[str, str]:
    """What both servers and their client run in: no keys, ``threads`` threads to compute with.

    vLLM on a CPU would bind itself to all cores but one; on two cores it would compute with half of what ours has.
    """
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    told = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "NO_PROXY": "127.0.0.1"}
    return kept | told | {"VLLM_NO_USAGE_STATS": "1"}


def _words(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
