"""The fetchers behind the first process of a start: told to begin, asked where they listen, and let go."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from firsttoken.study.errors import SwarmError
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_studies.combined.borrowed.neighbour import process_of

MODULE = "firsttoken_studies.combined.fetchers.fetcher"


class Fetchers:
    """``processes``, each for its own of ``layers``, whose libraries are imported. Raises SwarmError where one is not
    there."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], layers: Sequence[range]) -> None:
        self._processes, self._layers = processes, layers
        for one in processes:
            _line(one)

    def go(self) -> None:
        """Let them begin to fetch."""
        for one in self._processes:
            one.stdin.write("\n")
            one.stdin.flush()

    def lenders(self) -> list[Lender]:
        """Where they listen. Raises SwarmError for one that has ended."""
        return [Lender(_line(one), layers) for one, layers in zip(self._processes, self._layers, strict=True)]

    def let_go(self) -> list[dict[str, Any]]:
        """End them; what each says of its fetching: {bytes, loaded_s}. Raises SwarmError for one that ended before."""
        said = []
        for one in self._processes:
            told, failure = one.communicate()
            if not told:
                raise SwarmError(f"a fetcher has ended: {_last(failure)}")
            said.append(json.loads(told))
        return said


@contextmanager
def fetchers(
    folder: Path, layers: Sequence[range], gbit_per_s: float, readers: int, cores: Collection[int], threads: int
) -> Iterator[Fetchers]:
    """A fetcher of each of ``layers`` of the checkpoint in ``folder``, over a link of ``gbit_per_s`` of its own; they
    share ``cores``. Raises SwarmError."""
    options = ["--gbit-per-s", f"{gbit_per_s:g}", "--readers", str(readers)]
    with ExitStack() as stack:
        each = [
            process_of([MODULE, str(folder), f"{one.start}:{one.stop}", *options], cores, threads) for one in layers
        ]
        yield Fetchers([stack.enter_context(one) for one in each], layers)


def _line(one: subprocess.Popen[str]) -> str:
    if not (said := one.stdout.readline().strip()):
        raise SwarmError(f"a fetcher did not start: {_last(one.stderr.read())}")
    return said


def _last(said: str) -> str:
    return (said.strip().splitlines() or ["it says nothing"])[-1]
