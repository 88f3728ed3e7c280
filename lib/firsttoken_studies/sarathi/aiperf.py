"""aiperf, somebody else's client of OpenAI's interface, from its own environment, and what it says of a server."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.foreign.faults import blaming
from firsttoken.study.foreign.json_text import read_json
from firsttoken.study.foreign.schema import at_least, shaped
from firsttoken.study.system.programs import last_line, started

AIPERF = paths.ROOT / ".venv-clients" / "bin" / "aiperf"
EXPORT = "profile_export_aiperf.json"
WARM_UP = 3  # requests that are not counted, one after the other
_PATIENCE_S = 120.0  # for aiperf to come up and to write what it saw, beside the load itself


@dataclass(frozen=True)
class PeerLoad:
    """``requests`` completions, ``per_s`` a second on average with Poisson arrivals, of made-up prompts of
    ``prompt_tokens`` tokens on average and ``prompt_spread`` standard deviation, greedy answers of ``new_tokens``
    tokens at most. The ``seed`` draws prompts, lengths and arrivals, for every server the same."""

    requests: int
    per_s: float
    prompt_tokens: int
    prompt_spread: int
    new_tokens: int
    seed: int


@dataclass(frozen=True)
class Averaged:
    """A count, or a rate."""

    avg: Annotated[float, at_least(0)]


@dataclass(frozen=True)
class Milliseconds:
    """How long something took, over requests."""

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


def aiperf_command(url: str, folder: Path, load: PeerLoad, out: Path) -> list[str]:
    """Ask the completions of ``url`` for the model that is called after its ``folder``; the export goes to ``out``."""
    options = {
        "endpoint-type": "completions",
        "url": url,
        "model": folder.name,
        "tokenizer": folder,
        "request-count": load.requests,
        "num-dataset-entries": load.requests + WARM_UP,
        "request-rate": load.per_s,
        "arrival-pattern": "poisson",
        "warmup-request-count": WARM_UP,
        "warmup-concurrency": 1,
        "isl": load.prompt_tokens,
        "isl-stddev": load.prompt_spread,
        "osl": load.new_tokens,
        "extra-inputs": "temperature:0",
        "random-seed": load.seed,
        "artifact-dir": out,
        "ui": "none",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    return [str(AIPERF), "profile", *words, *flags]


def check_there(what: str) -> None:
    """Raises FirstTokenError where aiperf's environment is missing."""
    if not AIPERF.exists():
        raise FirstTokenError(f"{what}: aiperf's environment is missing; run env/clients/setup.sh")


def ask(command: list[str], load: PeerLoad, out: Path, environment: dict[str, str]) -> dict[str, float]:
    """What ``command`` of :func:`aiperf_command` saw. Raises FirstTokenError where it ends with an error, takes too
    long, or saw one."""
    log, patience_s = out / "aiperf.log", _PATIENCE_S + 4 * load.requests / load.per_s
    with started(command, log, environment) as process:
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise FirstTokenError(f"live_peer: aiperf took more than {patience_s:.0f} s: {last_line(log)}") from None
    if code:
        raise FirstTokenError(f"live_peer: aiperf ended with {code}: {last_line(log)}")
    return answers(out / EXPORT, load.requests)


def answers(export: Path, requests: int) -> dict[str, float]:
    """What a row has of aiperf's export: seconds, tokens, and tokens a second.

    Raises FirstTokenError, naming the file, where it cannot be read, and for less than ``requests`` answers without an
    error.
    """
    with blaming(export.name, FirstTokenError, "run live_peer again with the aiperf of env/clients"):
        found = shaped(AiperfExport, read_json(export), others=True)
    errors = found.error_request_count.avg if found.error_request_count else 0
    if errors or found.error_summary or found.is_complete is False or found.request_count.avg != requests:
        why = f"; the first error: {found.error_summary[0]}"[:300] if found.error_summary else ""
        raise FirstTokenError(
            f"live_peer: aiperf saw {found.request_count.avg:.0f} answers to {requests} requests and {errors:.0f} "
            f"errors{why}"
        )
    times = {
        "ttft": found.time_to_first_token,
        "itl": found.inter_token_latency,
        "gap": found.inter_chunk_latency,
        "latency": found.request_latency,
    }
    row = {
        f"{name}_{what}_s": getattr(entry, key) / 1e3
        for name, entry in times.items()
        for what, key in (("mean", "avg"), ("p50", "p50"), ("p99", "p99"))
    }
    return row | {
        "requests": found.request_count.avg,
        "errors": errors,
        "prompt_tokens": found.input_sequence_length.avg,
        "output_tokens": found.output_sequence_length.avg,
        "tokens_per_s": found.output_token_throughput.avg,
    }
