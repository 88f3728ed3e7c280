"""One start with fetchers, in a process of its own: ``python -m firsttoken_studies.combined.fetchers.trial SPEC``.

Prints one line of JSON. The request arrives when the libraries of all its processes are imported; every time is in
seconds from then on.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.petals.patience import Patience
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.study.system.ending import tell_and_end
from firsttoken_studies.combined.borrowed.trial import WHOLE, StartSpec, prepare, start
from firsttoken_studies.combined.fetchers.division import divided
from firsttoken_studies.combined.fetchers.pipeline import fetchers

FETCHED = "fetched"
PATIENCE = Patience(step_s=600.0)
"""With fetchers, whose first answer waits for their layers; when all own ones are here nobody is waited for."""


@dataclass(frozen=True)
class FetchSpec(StartSpec):
    """``variant`` is WHOLE, or FETCHED by ``servers`` processes, each over a link of ``gbit_per_s``: the first on
    ``cores``, those behind it on ``others`` with so many threads each as it has."""

    servers: int = 1
    others: tuple[int, ...] = ()


def main(spec: FetchSpec) -> dict[str, Any]:
    """Run the trial and return its row; by process ``bytes_each``, and ``fetched_s``, when it had its part (None: it
    had not)."""
    prepare(spec)
    if spec.variant == WHOLE:
        row = start(spec, time.perf_counter())
        return row | {"servers": 1, "bytes_each": [row["bytes"]], "fetched_s": [row["loaded_s"]]}
    folder = Path(spec.staged)
    layers = divided(read_manifest(folder), spec.servers)[1:]
    with fetchers(folder, layers, spec.gbit_per_s, spec.readers, spec.others, spec.threads) as behind:
        arrived, clock = time.perf_counter(), time.monotonic()
        behind.go()
        row = start(spec, arrived, lambda _: behind.lenders(), PATIENCE)
        told = behind.let_go()
    fetched = [row["ends_s"], *(one["loaded_s"] and one["loaded_s"] - clock for one in told)]
    moved = [row["bytes"], *(one["bytes"] for one in told)]
    return row | {"servers": spec.servers, "bytes_each": moved, "fetched_s": fetched}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    tell_and_end({"variant": asked["variant"]} | main(FetchSpec(**asked)))
