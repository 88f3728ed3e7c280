"""How many tokens a second come over HTTP, beside the same engine without it, turn by turn in one run.

``python tests/serve/bench.py FOLDER`` serves a checkpoint on loopback and asks it from another process; the
engine alone answers the same prompts in a process of its own, fused as the service is.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from firsttoken_studies.probes.programs import free_port, started

PROMPT_TOKENS = 32
_DONE = b"data: [DONE]\n\n"


def prompts(streams: int) -> list[list[int]]:
    """As many prompts of token ids, no two alike."""
    return [[(7 * stream + 3 * place) % 500 + 10 for place in range(PROMPT_TOKENS)] for stream in range(streams)]


def over_http(host: str, port: int, streams: int, tokens: int) -> float:
    """Tokens/s of so many streams at once, from the first request to the last token.

    The client shares the processor with what it measures, so it does no more than to take the bytes until the end, one
    answer after the other while those of the others wait in the system's buffers, and reads in them afterwards.
    """
    asked = {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    with ExitStack() as opened:
        connections = [opened.enter_context(socket.create_connection((host, port))) for _ in range(streams)]
        for connection, prompt in zip(connections, prompts(streams), strict=True):
            body = json.dumps(asked | {"prompt": prompt}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
        answers = [_until_done(connection) for connection in connections]
    took = time.perf_counter() - start
    return sum(map(_said, answers)) / took


def _until_done(connection: socket.socket) -> bytes:
    taken = bytearray()
    while _DONE not in taken[-64:]:
        if not (more := connection.recv(1 << 20)):
            raise ConnectionError("the service ended an answer before its last event")
        taken += more
    return bytes(taken)


def _said(answer: bytes) -> int:
    last = answer[answer.rindex(b'data: {"id"') : answer.rindex(_DONE)].split(b"\n\n")[0]
    return json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]


def alone(folder: Path, tokens: int, scheduler: str) -> None:
    """Print tokens/s of the engine by itself, for each line that comes in: how many streams."""
    from firsttoken.assets.models import load_model
    from firsttoken.engine.accelerator import fuse
    from firsttoken.engine.engine import Engine, EngineConfig
    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken.engine.request import Sampling
    from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
    from firsttoken.progressiveserve.checkpoint.names import torch_dtype
    from firsttoken.study import dtypes

    stored = torch_dtype(read_manifest(folder).dtype)
    model = fuse(load_model(str(folder), dtype=dtypes.serving(dtypes.AUTO, stored, "cpu")).model)
    executor = LiveExecutor(model, 1024)
    for line in sys.stdin:
        start = time.perf_counter()
        engine = Engine(executor, EngineConfig(scheduler=scheduler, watermark=0.0))
        requests = engine.serve([(prompt, Sampling(tokens), 0.0) for prompt in prompts(int(line))])
        print(sum(len(request.output) for request in requests) / (time.perf_counter() - start), flush=True)


@contextmanager
def _served(folder: Path, port: int) -> Iterator[None]:
    import httpx

    command = [sys.executable, "-m", "firsttoken", "serve", str(folder), "--port", str(port)]
    with started(command, Path(os.devnull), os.environ) as process:
        while process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/stage", timeout=10).json()["state"] == "complete":
                    break
            except (httpx.HTTPError, ValueError):
                pass
            time.sleep(0.2)
        time.sleep(3)  # in which the last stage's layers are fused
        yield


def main() -> None:
    """Measure and print both, their medians and the ratio with its range over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scheduler", default="sarathi")
    parser.add_argument("--alone", action="store_true", help="only the engine, in turns with another process")
    options = parser.parse_args()
    if options.alone:
        alone(options.folder, options.tokens, options.scheduler)
        return
    port = free_port()
    command = [sys.executable, __file__, *sys.argv[1:], "--alone"]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with _served(options.folder, port):
        for streams in options.streams:
            rows = []
            for turn in range(options.rounds + 1):
                http = over_http("127.0.0.1", port, streams, options.tokens)
                print(streams, file=engine.stdin, flush=True)
                plain = float(engine.stdout.readline())
                print(f"{turn or 'warm-up'}: {http:.1f} tokens/s over HTTP, {plain:.1f} alone", flush=True)
                rows += [(http, plain)] if turn else []
            _tell(streams, options.tokens, rows)
    engine.stdin.close()
    engine.wait()


def _tell(streams: int, tokens: int, rows: Sequence[tuple[float, float]]) -> None:
    http, plain = (statistics.median(column) for column in zip(*rows, strict=True))
    shares = sorted(one / other for one, other in rows)
    spread = f"median {statistics.median(shares):.2f}, from {shares[0]:.2f} to {shares[-1]:.2f}"
    what = f"{streams} streams of {tokens} tokens, n={len(rows)} rounds"
    print(f"{what}: {http:.1f} over HTTP, {plain:.1f} alone; shares of it: {spread}", flush=True)


if __name__ == "__main__":
    main()
