"""How many tokens a second come over HTTP, beside the same engine without it, turn by turn in one run.

``python -m firsttoken.progressive.service.bench FOLDER`` serves a staged checkpoint on loopback and asks it from
another process; the engine alone answers the same prompts in a process of its own, fused as the service is.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

PROMPT_TOKENS = 32


def prompts(streams: int) -> list[list[int]]:
    """As many prompts of token ids, no two alike."""
    return [[(7 * stream + 3 * place) % 500 + 10 for place in range(PROMPT_TOKENS)] for stream in range(streams)]


def over_http(url: str, streams: int, tokens: int) -> float:
    """Tokens/s of so many streams at once, from the first request to the last token."""
    import httpx

    def one(prompt: Sequence[int]) -> int:
        body = {"prompt": list(prompt), "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
        return json.loads(lines[-1].removeprefix("data: "))["usage"]["completion_tokens"]

    start = time.perf_counter()
    with ThreadPoolExecutor(streams) as clients:
        said = sum(clients.map(one, prompts(streams)))
    return said / (time.perf_counter() - start)


def alone(folder: Path, streams: int, tokens: int, rounds: int, scheduler: str) -> None:
    """Print tokens/s of the engine by itself, a line for each line that comes in."""
    from firsttoken.assets.models import load_model
    from firsttoken.engine.config import EngineConfig
    from firsttoken.engine.engine import Engine
    from firsttoken.engine.fused import fuse
    from firsttoken.engine.live import LiveExecutor
    from firsttoken.engine.request import Sampling
    from firsttoken.progressive.checkpoint.manifest import read_manifest
    from firsttoken.progressive.loading.placement import torch_dtype
    from firsttoken.study import dtypes

    stored = torch_dtype(read_manifest(folder).dtype)
    model = fuse(load_model(str(folder), dtype=dtypes.serving(dtypes.AUTO, stored, "cpu")).model)
    executor = LiveExecutor(model, streams * (-(-(PROMPT_TOKENS + tokens) // 16) + 1))
    for _ in range(rounds):
        sys.stdin.readline()
        start = time.perf_counter()
        engine = Engine(executor, EngineConfig(scheduler=scheduler, watermark=0.0))
        requests = engine.serve([(prompt, Sampling(tokens), 0.0) for prompt in prompts(streams)])
        print(sum(len(request.output) for request in requests) / (time.perf_counter() - start), flush=True)


@contextmanager
def _served(folder: Path, port: int):
    command = [sys.executable, "-m", "firsttoken", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Measure and print both, their medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `firsttoken stage` wrote")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="of each, in turn, after one to warm up")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        return alone(options.folder, options.streams, options.tokens, options.rounds + 1, "sarathi")
    import httpx

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "firsttoken.progressive.service.bench", *sys.argv[1:], "--alone"]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[float]] = {"http": [], "engine": []}
    with _served(options.folder, port) as url:
        while True:
            try:
                if httpx.get(f"{url}/stage", timeout=10).json()["state"] == "complete":
                    break
            except (httpx.HTTPError, ValueError):
                pass
            time.sleep(0.2)
        for turn in range(options.rounds + 1):
            http = over_http(url, options.streams, options.tokens)
            engine.stdin.write("\n")
            engine.stdin.flush()
            plain = float(engine.stdout.readline())
            print(f"{turn or 'warm-up'}: {http:.1f} tokens/s over HTTP, {plain:.1f} alone", flush=True)
            if turn:
                found["http"].append(http)
                found["engine"].append(plain)
    engine.wait()
    http, plain = (statistics.median(found[name]) for name in ("http", "engine"))
    said = f"{options.streams} streams of {options.tokens} tokens, {options.rounds} rounds"
    print(f"{said}: {http:.1f} over HTTP, {plain:.1f} alone, {http / plain:.2f} of it, {torch.get_num_threads()} cores")


if __name__ == "__main__":
    main()
