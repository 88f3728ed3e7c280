"""What a service's rate is beside a process that takes one core, over its quiet rate (a script, which the suite does
not run): ``python tests/serve/soak_beside.py FOLDER [--turns 5] [--gbit-per-s 0.1]``.

Each turn asks once quiet and once beside a loop on the first core, in turns, so that other work meets both. With
``--gbit-per-s`` the folder's stages arrive over such a link, and a stream says what each stage's tokens take, quiet and
beside the loop, in a service of its own each.
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
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

TOKENS = 24
BODY = {"prompt": "The capital of France is", "max_tokens": TOKENS, "temperature": 0, "stream": True}


@contextmanager
def loop(runs: bool) -> Iterator[None]:
    """A process that takes the first core, where it ``runs``."""
    command = [sys.executable, "-c", "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"]
    process = subprocess.Popen(command) if runs else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


@contextmanager
def service(folder: Path, *options: str) -> Iterator[httpx.Client]:
    """A service of ``folder`` that takes requests."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "firsttoken", "serve", str(folder), "--port", str(port)]
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS" or text != "1"}
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        url = next(word for word in process.stdout.readline().split() if word.startswith("http")).rstrip(";")
        with httpx.Client(base_url=url, timeout=600) as client:
            yield client
    finally:
        process.terminate()
        process.wait(60)


def gaps(client: httpx.Client, tokens: int = TOKENS) -> dict[int, list[float]]:
    """Seconds between tokens of one stream, by the stage that computed the later one."""
    times, last = defaultdict[int, list[float]](list), None
    with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": tokens, "upgrade": True}) as answer:
        for line in filter(lambda text: text.startswith("data: {"), answer.iter_lines()):
            now = time.perf_counter()
            if last is not None:
                times[json.loads(line.removeprefix("data: "))["stage"]].append(now - last)
            last = now
    return times


def rate(times: dict[int, list[float]]) -> float:
    every = [gap for some in times.values() for gap in some]
    return len(every) / sum(every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--gbit-per-s", default="")
    options = parser.parse_args()
    if options.gbit_per_s:
        for runs in (False, True):
            with loop(runs), service(options.folder, "--gbit-per-s", options.gbit_per_s) as client:
                for stage, times in gaps(client, 400).items():
                    print(
                        f"loop {runs}, stage {stage}: {len(times) / sum(times):.1f} tokens/s, n={len(times)}",
                        flush=True,
                    )
        return
    with service(options.folder) as client:
        while client.get("/stage").json()["state"] != "complete":
            time.sleep(0.2)
        time.sleep(3)  # layers are fused
        gaps(client)
        rates = defaultdict[bool, list[float]](list)
        for _ in range(options.turns):
            for runs in (False, True):
                with loop(runs):
                    rates[runs].append(rate(gaps(client)))
    shares = [beside / quiet for quiet, beside in zip(rates[False], rates[True], strict=True)]
    for name, numbers in (("quiet", rates[False]), ("beside", rates[True]), ("share", shares)):
        print(f"{name}: {statistics.median(numbers):.2f} {[round(number, 2) for number in sorted(numbers)]}")
    print(f"load {os.getloadavg()[0]:.1f}, n={options.turns}")


if __name__ == "__main__":
    main()
