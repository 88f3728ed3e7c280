"""One start with fetchers, in a process of its own.

``python -m firsttoken_studies.nb56_a_start_that_borrows.fetch_trial SPEC``

Prints one line of JSON. The request arrives when the libraries of all its processes are imported; every time is in
seconds from then on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.petals.timeouts import Timeouts
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.study.errors import SwarmError
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_studies.combined.borrowed.neighbour import process_of
from firsttoken_studies.nb56_a_start_that_borrows.borrow_spec import WHOLE, StartSpec
from firsttoken_studies.nb56_a_start_that_borrows.borrow_trial import prepare, start
from firsttoken_studies.nb56_a_start_that_borrows.division import divided
from firsttoken_studies.probes.fast_exit import tell_and_end

# The fetchers behind the first process of a start: told to begin, asked where they listen, and let go.

MODULE = "firsttoken_studies.nb56_a_start_that_borrows.fetcher"


class Fetchers:
    """``processes``, each for its own of ``layers``, whose libraries are imported. Raises SwarmError where one is not
    there."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], layers: Sequence[range]) -> None:
        self._processes, self._layers = processes, layers
        for process in processes:
            _line(process)

    def go(self) -> None:
        """Make all fetchers begin to fetch."""
        for process in self._processes:
            process.stdin.write("\n")
            process.stdin.flush()

    def lenders(self) -> list[Lender]:
        """Return the addresses at which the fetchers listen. Raises SwarmError for one that has ended."""
        return [Lender(_line(process), layers) for process, layers in zip(self._processes, self._layers, strict=True)]

    def let_go(self) -> list[dict[str, Any]]:
        """End the fetchers; return each one's report of its fetching: {bytes, loaded_s}. Raises SwarmError for one that
        ended before."""
        reports = []
        for process in self._processes:
            output, failure = process.communicate()
            if not output:
                raise SwarmError(f"a fetcher has ended: {_last(failure)}")
            reports.append(json.loads(output))
        return reports


@contextmanager
def fetchers(
    folder: Path, layers: Sequence[range], gbit_per_s: float, readers: int, cores: Collection[int], threads: int
) -> Iterator[Fetchers]:
    """A fetcher of each of ``layers`` of the checkpoint in ``folder``, over a link of ``gbit_per_s`` of its own; they
    share ``cores``. Raises SwarmError."""
    options = ["--gbit-per-s", f"{gbit_per_s:g}", "--readers", str(readers)]
    with ExitStack() as stack:
        processes = [
            process_of([MODULE, str(folder), f"{span.start}:{span.stop}", *options], cores, threads) for span in layers
        ]
        yield Fetchers([stack.enter_context(process) for process in processes], layers)


def _line(process: subprocess.Popen[str]) -> str:
    if not (line := process.stdout.readline().strip()):
        raise SwarmError(f"a fetcher did not start: {_last(process.stderr.read())}")
    return line


def _last(output: str) -> str:
    return (output.strip().splitlines() or ["it says nothing"])[-1]


FETCHED = "fetched"
TIMEOUTS = Timeouts(step_s=600.0)
"""With fetchers, whose first answer waits for their layers; when all own ones are here nobody is waited for."""


@dataclass(frozen=True)
class FetchSpec(StartSpec):
    """``variant`` is WHOLE, or FETCHED by ``servers`` processes, each over a link of ``gbit_per_s``: the first on
    ``cores``, those behind it on ``others`` with so many threads each as it has. They bring the layers [a, b) of each
    of ``layers`` (none: about as many bytes each)."""

    servers: int = 1
    others: tuple[int, ...] = ()
    layers: tuple[tuple[int, int], ...] = ()


def main(spec: FetchSpec) -> dict[str, Any]:
    """Run the trial and return its row; by process ``bytes_each``, and ``fetched_s``, when it had its part (None: it
    had not)."""
    prepare(spec)
    if spec.variant == WHOLE:
        row = start(spec, time.perf_counter())
        return row | {"servers": 1, "bytes_each": [row["bytes"]], "fetched_s": [row["loaded_s"]]}
    folder = Path(spec.staged)
    spans = [range(*span) for span in spec.layers] or divided(read_manifest(folder), spec.servers)
    layers = spans[1:]
    with fetchers(folder, layers, spec.gbit_per_s, spec.readers, spec.others, spec.threads) as behind:
        arrived, clock = time.perf_counter(), time.monotonic()
        behind.go()
        row = start(spec, arrived, lambda _: behind.lenders(), TIMEOUTS)
        reports = behind.let_go()
    fetched = [row["ends_s"], *(report["loaded_s"] and report["loaded_s"] - clock for report in reports)]
    moved = [row["bytes"], *(report["bytes"] for report in reports)]
    return row | {"servers": spec.servers, "bytes_each": moved, "fetched_s": fetched}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    tell_and_end({"variant": arguments["variant"]} | main(FetchSpec(**arguments)))
