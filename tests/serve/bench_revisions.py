"""How this tree serves beside an earlier revision of it, turn by turn in one run.

``python tests/serve/bench_revisions.py REVISION FOLDER`` checks the revision out into a folder of its own, which is
removed in the end, and asks both trees the same: the seconds of ``firsttoken --help``; a plain folder served from this
disk, and what each tree has staged served over 1 Gbit/s, in seconds from the creation of the process to the first byte
of a streamed answer, the files out of the page cache before; and the tokens a second of several streams at once, once
the model is whole. Both run in the environment that runs this file.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import numpy as np

from firsttoken.study.stats import ratio_of_means
from firsttoken_studies.probes.pagecache import evict
from firsttoken_studies.probes.programs import free_port

BEFORE, NOW = "before", "now"
HERE = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"
TOKENS, PROMPT_TOKENS = 64, 32
_DONE = b"data: [DONE]\n\n"


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with the files of ``revision`` for the time of the block."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", HERE, "worktree", "add", "-q", "--detach", tree, revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", HERE, "worktree", "remove", "--force", tree], check=True)


def help_s(environment: dict[str, str]) -> float:
    """Seconds of ``firsttoken --help``."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "firsttoken", "--help"]
    subprocess.run(command, env=environment, cwd="/", check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


@contextmanager
def served(folder: Path, environment: dict[str, str], *more: str) -> Iterator[tuple[int, float, subprocess.Popen]]:
    """The port of a service of ``folder``, when its process was created, and that."""
    port, begun = free_port(), time.monotonic()
    command = [sys.executable, "-m", "firsttoken", "serve", str(folder), "--port", str(port), *more]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, cwd="/", **quiet) as process:
        try:
            yield port, begun, process
        finally:
            process.terminate()


def first_byte_s(folder: Path, environment: dict[str, str], *more: str) -> float:
    """Seconds from the creation of the service's process to the first token of an answer; its files lie cold."""
    for file in folder.rglob("*"):
        if file.is_file():
            evict(file)
    asked = json.dumps({"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True})
    with served(folder, environment, *more) as (port, begun, process):
        while process.poll() is None:
            client = HTTPConnection("127.0.0.1", port, timeout=600)
            with suppress(ConnectionRefusedError):
                client.request("POST", "/v1/completions", asked)
                answer = client.getresponse()
                line = answer.readline()
                took = time.monotonic() - begun
                assert answer.status == 200 and line.startswith(b"data: {"), (answer.status, line)
                answer.read()
                client.close()
                return took
            time.sleep(0.002)
        raise RuntimeError(f"the service of {folder} ended before its first token")


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


def tokens_per_s(folder: Path, environment: dict[str, str], streams: int, rounds: int) -> list[float]:
    """Tokens/s of ``streams`` at once, ``rounds`` times over after one that warms up."""
    with served(folder, environment) as (port, _, process):
        while process.poll() is None:
            with suppress(ConnectionRefusedError):
                client = HTTPConnection("127.0.0.1", port, timeout=600)
                client.request("GET", "/stage")
                if json.loads(client.getresponse().read())["state"] == "complete":
                    break
            time.sleep(0.2)
        time.sleep(4)  # in which torch is imported and the layers are fused
        return [over_http("127.0.0.1", port, streams, TOKENS) for _ in range(rounds + 1)][1:]


def main() -> None:
    """Measure both trees and print the ratio of now to before, with its 95 % interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("folder", type=Path, help="a plain folder of a Llama-like model")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    draw = random.Random(0)
    with checked_out(options.revision) as tree:
        trees = {BEFORE: tree, NOW: HERE}
        for place in trees.values():  # as pip does with what it installs
            compileall.compile_dir(place / "lib", quiet=2)
        environments = {name: dict(os.environ, PYTHONPATH=str(place / "lib")) for name, place in trees.items()}
        folder, staged = options.folder.resolve(), dict[str, Path]()
        for name in trees:
            staged[name] = tree.parent / f"staged_{name}"
            command = [sys.executable, "-m", "firsttoken", "stage", str(staged[name])]
            subprocess.run(command, env=environments[name], cwd="/", check=True, stdout=subprocess.DEVNULL)
        tried = {
            "firsttoken --help, s": lambda name: [help_s(environments[name])],
            "first token from the disk, s": lambda name: [first_byte_s(folder, environments[name])],
            "first token at 1 Gbit/s, s": lambda name: [
                first_byte_s(staged[name], environments[name], "--gbit-per-s", "1")
            ],
        }
        for what, measure in tried.items():
            seen: dict[str, list[float]] = {BEFORE: [], NOW: []}
            for turn in range(options.rounds + 1):
                for name in draw.sample([BEFORE, NOW], 2):
                    seen[name] += measure(name) if turn else measure(name)[:0]
            tell(what, seen)
        for streams in options.streams:
            seen = {BEFORE: [], NOW: []}
            for _ in range(2):
                for name in draw.sample([BEFORE, NOW], 2):
                    seen[name] += tokens_per_s(folder, environments[name], streams, (options.rounds + 1) // 2)
            tell(f"{streams} streams of {TOKENS} tokens, tokens/s", seen)


def tell(what: str, seen: dict[str, list[float]]) -> None:
    """Print the medians of both and the ratio of their means."""
    before, now = (np.array(seen[name]) for name in (BEFORE, NOW))
    ratio = ratio_of_means(now, before)
    medians = f"{np.median(before):.3f} before, {np.median(now):.3f} now"
    print(f"{what}: {medians}; {ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], n={len(now)}", flush=True)


if __name__ == "__main__":
    main()
