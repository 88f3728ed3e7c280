"""One answer of a service that starts, in a process of its own: ``python -m ... SPEC``. Prints one line of JSON.

Times are ``time.monotonic``, which parent and child share: the interpreter's own start counts where it says so.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.engine.request import Sampling
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken_studies.probes.fast_exit import tell_and_end
from firsttoken_studies.progressiveserve.coldstart.spec import TrialSpec


@dataclass(frozen=True)
class AnswerSpec(TrialSpec):
    """A trial that asks for an answer of up to ``tokens`` to the prompt ``ids``, which ends at a token of ``stop``;
    with ``drafts`` what has arrived drafts it, and else it waits for the whole model."""

    ids: tuple[int, ...] = ()
    tokens: int = 1
    stop: tuple[int, ...] = ()
    drafts: bool = False


def main(spec: AnswerSpec) -> dict[str, Any]:
    """Start a server, ask at once, and return when the final answer's first token and its last came, in seconds."""
    limits = RequestLimits(max_sessions=1, max_prompt_tokens=len(spec.ids), max_new_tokens=spec.tokens)
    asked_s = time.monotonic()
    server = StagedServer(Path(spec.staged), [Link(LinkConfig(spec.gbit_per_s))], limits, threads=spec.readers)
    sampling = Sampling(spec.tokens, stop=tuple(spec.stop), verify="equal", drafts=spec.drafts)
    server.start()
    events = list(server.submit(list(spec.ids), sampling).events())
    final, drafts = ([event for event in events if event.draft is draft] for draft in (False, True))
    row = {"tokens": [event.token_id for event in final], "drafted": len(drafts)}
    row |= {"kept": sum(a.token_id == b.token_id for a, b in zip(drafts, final, strict=False))}
    row |= {f"{name}_s": event.at_s - asked_s for name, event in (("first", final[0]), ("answer", final[-1]))}
    return row | {"process_s": final[-1].at_s - spec.spawned_s, "bytes": server.status()["bytes_loaded"]}


if __name__ == "__main__":
    trial_spec = AnswerSpec(**json.loads(sys.argv[1]))
    tell_and_end({"variant": trial_spec.variant} | main(trial_spec))
