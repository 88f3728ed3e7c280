"""One timeline, in a process of its own: ``python -m firsttoken_studies.nb15_recovery_timeline.trial < SPEC``.

Prints one line of JSON: a list of rows, times in seconds from the moment the server starts.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.loading.views import StageView
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken.progressiveserve.staged_serving.transitions import Transition
from firsttoken_studies.probes.fast_exit import tell_and_end
from firsttoken_studies.probes.footprint import MemoryGrowth, resident
from firsttoken_studies.progressiveserve.device_memory import device_now, device_peak


@dataclass(frozen=True)
class TimelineSpec:
    """The settings that the parent gives; see ``timeline.TimelineConfig``. In ``moves`` are the pairs of stages between
    which an open request moves: the one that serves it, and a better one that has come."""

    folder: str
    prompt: list[int]
    moves: list[tuple[int, int]]
    gbit_per_s: float
    clients: int
    new_tokens: int
    duration_s: float
    sample_s: float
    threads: int
    device: str
    dtype: str


class MovesBy(Transition):
    """A transition in which the stage that ``rule`` names of two, the one that serves a request and the one that has
    come, goes on; the new one computes everything again."""

    name = "by a rule"

    def __init__(self, rule: Callable[[int, int], int]) -> None:
        self._rule = rule

    def redo(self, old: StageView, new: StageView) -> range | None:
        """Return all layers where the rule names the new stage."""
        return range(len(new.layers)) if self._rule(old.stage, new.stage) == new.stage else None


def main(spec: TimelineSpec) -> list[dict[str, Any]]:
    """Run the server and its clients, and return what was seen."""
    if spec.threads:
        torch.set_num_threads(spec.threads)
    growth = MemoryGrowth()
    rows: list[dict[str, Any]] = [{"row": "memory", "at_s": 0.0, "rss_bytes": growth.before}]
    link = Link(LinkConfig(spec.gbit_per_s))
    limits = RequestLimits(
        max_sessions=spec.clients,
        max_prompt_tokens=len(spec.prompt),
        max_new_tokens=spec.new_tokens,
    )
    moves, placement = {(now, best) for now, best in spec.moves}, {"device": spec.device, "dtype": spec.dtype}
    policy = MovesBy(lambda now, best: best if (now, best) in moves else now)
    server = StagedServer(Path(spec.folder), [link], limits, policy=policy, **placement)
    start = time.monotonic()
    server.start()
    threads = [threading.Thread(target=_client, args=(server, spec, i, start, rows)) for i in range(spec.clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        memory_row = {"row": "memory", "at_s": time.monotonic() - start}
        rows.append(memory_row | {"rss_bytes": resident()} | device_now(spec.device))
        time.sleep(spec.sample_s)
    grown = growth.bytes()
    peak = {"row": "peak", "rss_bytes": None if grown is None else growth.before + grown}
    rows.append(peak | {"model_bytes": read_manifest(Path(spec.folder)).bytes} | device_peak(spec.device))
    events = [{"row": "event", **event} for event in server.status()["events"]]
    server.close()
    return rows + events


def _client(server: StagedServer, spec: TimelineSpec, client: int, start: float, rows: list[dict[str, Any]]) -> None:
    """One request after another, until the time is over and one has begun while all stages served."""
    complete = False
    for request in itertools.count():
        asked_s = time.monotonic() - start
        if asked_s > spec.duration_s and complete:
            return
        complete = server.status()["state"] == "complete"
        tokens = 0
        for event in server.submit(spec.prompt, spec.new_tokens, bool(spec.moves)).events():
            tokens += 1
            time_s = event.at_s - start
            rows.append({"row": "token", "client": client, "request": request, "at_s": time_s, "stage": event.stage})
        rows.append({"row": "request", "client": client, "request": request, "at_s": asked_s, "tokens": tokens})


if __name__ == "__main__":
    tell_and_end(main(TimelineSpec(**json.loads(sys.stdin.read()))))
