"""Answers of a service that starts, in a process of its own: ``python -m ... SPEC``. Prints one line of JSON.

Times are ``time.monotonic``, which parent and child share: the interpreter's own start counts where it says so.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from firsttoken.engine.request import Sampling
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken_studies.probes.fast_exit import tell_and_end
from firsttoken_studies.progressiveserve.coldstart.spec import TrialSpec

ASK_S = 0.01  # between two looks at whether the load has ended


@dataclass(frozen=True)
class AnswerSpec(TrialSpec):
    """A trial that asks for an answer of up to ``tokens`` to each of ``prompts``, which ends at a token of ``stop``;
    with ``drafts`` what has arrived drafts it, and else it waits for the whole model. With ``late`` it asks once every
    layer is there, and else at once."""

    prompts: tuple[tuple[int, ...], ...] = ()
    tokens: int = 1
    stop: tuple[int, ...] = ()
    drafts: bool = False
    late: bool = False


def main(spec: AnswerSpec) -> dict[str, Any]:
    """Start a server, ask it, and return when the last layer came, and the first token of the last final answer and its
    end, in seconds from the start on."""
    longest = max(map(len, spec.prompts))
    limits = RequestLimits(len(spec.prompts), max_prompt_tokens=longest, max_new_tokens=spec.tokens)
    began_s = time.monotonic()
    server = StagedServer(Path(spec.staged), [Link(LinkConfig(spec.gbit_per_s))], limits, threads=spec.readers)
    sampling = Sampling(spec.tokens, stop=tuple(spec.stop), verify="equal", drafts=spec.drafts)
    server.start()
    while spec.late and _arrived_s(server) is None and server.status()["error"] is None:
        time.sleep(ASK_S)
    sessions = [server.submit(list(ids), sampling) for ids in spec.prompts]
    answers = [list(session.events()) for session in sessions]
    final, drafts = ([[e for e in events if e.draft is draft] for events in answers] for draft in (False, True))
    row = {"tokens": [event.token_id for event in final[0]], "drafted": len(drafts[0])}
    row |= {"kept": sum(a.token_id == b.token_id for a, b in zip(drafts[0], final[0], strict=False))}
    moments = {name: max(events[index].at_s for events in final) for name, index in (("first", 0), ("answer", -1))}
    gaps = [later.at_s - event.at_s for events in final for event, later in pairwise(events)]
    row |= {f"{name}_s": at_s - began_s for name, at_s in moments.items()} | {"step_s": median(gaps) if gaps else None}
    row |= {"loaded_s": _arrived_s(server), "process_s": moments["answer"] - spec.spawned_s}
    return row | {"bytes": server.status()["bytes_loaded"]}


def _arrived_s(server: StagedServer) -> float | None:
    """Seconds from the start until the last layer was in its place; None before."""
    status = server.status()
    moments = {event["stage"]: event["at_s"] for event in status["events"] if event["what"] == "arrived"}
    return moments.get(status["stages"])


if __name__ == "__main__":
    trial_spec = AnswerSpec(**json.loads(sys.argv[1]))
    tell_and_end({"variant": trial_spec.variant} | main(trial_spec))
