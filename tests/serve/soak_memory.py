"""Thousands of requests to a service with variants, stored prefixes, shared blocks and preemption: does it grow?

``python tests/serve/soak_memory.py --requests 10000`` serves a tiny random model and two adapters on it in a process
of its own. After every 500 requests, once all of them have ended, it reads that process's memory, threads and open
files. It prints a table, and by how much the memory grew from the 2,000th request on, and in the last half of the
requests: what is made once, and the words that the tokenizer remembers, come before. The interval of the slope is that
of a straight line whose errors are independent, which memory's are not quite.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from mixed_requests import BLOCKS, LONGEST, MODELS, RUNNING, VARIANTS, WAITING, wave, write_place
from services import free_port
from waiting import until

from firsttoken_cpu.native.exports import load_exports

EACH, FROM = 500, 2000  # requests between two readings, and before the first that counts
FLAT_KB = 10.0  # per 1,000 requests: at 10,000 a day 36 MB a year


class Held(NamedTuple):
    """What the service holds while nobody asks."""

    requests: int
    resident_kb: int
    own_kb: int  # of it, what no file holds
    threads: int
    files: int
    sessions: int
    blocks: int
    restored: int


@contextlib.contextmanager
def service() -> Iterator[tuple[int, int]]:
    """Port and process id of the service."""
    with tempfile.TemporaryDirectory() as at:
        place, port = Path(at), free_port()
        with contextlib.redirect_stdout(io.StringIO()):  # what was stored, nine times
            write_place(place)
        command = [sys.executable, "-m", "firsttoken", "serve", str(place / MODELS[0]), "--port", str(port)]
        command += [word for name in VARIANTS for word in ("--variant", f"{name}={place / name}")]
        command += ["--prefix-store", str(place / "store"), "--share-prefixes", "--preemption", "online"]
        command += ["--kv-blocks", str(BLOCKS), "--max-model-len", str(LONGEST)]
        command += ["--max-running", str(RUNNING), "--max-waiting", str(WAITING)]
        with contextlib.suppress(OSError):  # no compiler
            load_exports()  # the service would go on without its kernels while they are built
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until(lambda: process.poll() is not None or _ready(port), "the store is open")
            assert process.poll() is None, "the service did not start"
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()


def held(port: int, pid: int, requests: int) -> Held:
    """Once every session has ended."""
    until(lambda: _stage(port)["sessions"] == 0 and _stage(port)["engine"]["blocks_used"] == 0, "all places are free")
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = {line.split()[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
    files, stage = len(list(Path(f"/proc/{pid}/fd").iterdir())), _stage(port)
    memory = int(numbers["VmRSS:"]), int(numbers["RssAnon:"])
    counts = stage["sessions"], stage["engine"]["blocks_used"], stage["restored"]
    return Held(requests, *memory, int(numbers["Threads:"]), files, *counts)


def soak(requests: int, seed: int, each: int = EACH) -> tuple[list[Held], Counter[str]]:
    """What is held after ``each`` of so many requests, and how all ended."""
    rows, ends, begun = [], Counter(), time.monotonic()
    with service() as (port, pid):
        print(*(f"{name:>11}" for name in (*Held._fields, "seconds")), flush=True)
        for number in range(requests // each):
            ends += asyncio.run(wave(port, each, 1000 * seed + number))
            rows.append(held(port, pid, (number + 1) * each))
            print(*(f"{value:>11}" for value in (*rows[-1], round(time.monotonic() - begun))), flush=True)
    return rows, ends


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """The slope of the straight line through the points of ``x`` and ``y``, and its 95 % interval."""
    from scipy.stats import linregress, t

    line = linregress(x, y)
    half = float(t.ppf(0.975, len(x) - 2)) * line.stderr
    return line.slope, line.slope - half, line.slope + half


def verdict(rows: Sequence[Held]) -> str:
    """By how much it grew from the reading after ``FROM`` requests to the last one, and in the last half of these."""
    counted = [row for row in rows if row.requests >= FROM]
    if len(counted) < 6:
        return f"no verdict: fewer than six readings from request {FROM:,} on"
    said = []
    for some in (counted, counted[len(counted) // 2 :]):
        for name in ("resident_kb", "own_kb"):
            kb = [getattr(row, name) for row in some]
            rate, low, high = (1000 * value for value in slope([row.requests for row in some], kb))
            said.append(
                f"{name}: {(kb[-1] - kb[0]) / 1024:+.2f} MB to {kb[-1] / 1024:.0f} from request {some[0].requests:,} "
                f"to {some[-1].requests:,}; {rate:+.1f} kB [{low:+.1f}, {high:+.1f}] per 1,000 requests: "
                f"{'flat' if low <= FLAT_KB else 'it grows'}"
            )
    for name in ("threads", "files"):
        found = [getattr(row, name) for row in counted]
        said.append(f"{name}: {min(found)} to {max(found)}, {found[-1]} at the end")
    return "\n".join(said)


def _stage(port: int) -> dict[str, Any]:
    return httpx.get(f"http://127.0.0.1:{port}/stage", timeout=30).json()


def _ready(port: int) -> bool:
    try:
        stage = _stage(port)
    except httpx.TransportError:
        return False
    return stage["state"] == "complete" and "stored prefixes are used" in str(stage["events"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows, ends = soak(options.requests, options.seed)
    print(dict(ends), verdict(rows), sep="\n")
