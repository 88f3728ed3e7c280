"""A run as one tidy table: a line an iteration and a line a request, told apart by ``what``."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from firsttoken.engine.request import Request
from firsttoken.engine.trace import Trace
from firsttoken.study.files import replacing

ITERATION, REQUEST = "iteration", "request"
COLUMNS = (  # of an iteration, then of a request; what a line has not stays empty
    *("what", "number", "at_s", "seconds", "requests", "prefill_tokens", "decode_tokens", "recompute_tokens"),
    *("prompt_tokens", "output_tokens", "begun_s", "ttft_s", "tpot_s", "preemptions"),
)


def run_rows(trace: Trace, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
    """Rows by ``COLUMNS``. ``at_s`` is the begin of an iteration and the arrival of a request, ``seconds`` how long
    either took, ``begun_s`` when a request was in a step first: seconds of the engine's clock. What a request that was
    cancelled never came to is None."""
    for number, step in enumerate(trace.steps):
        row = {"what": ITERATION, "number": number, "at_s": step.at_s, "seconds": step.seconds}
        tokens = {f"{kind}_tokens": count for kind, count in step.tokens.items()}
        yield row | {"requests": len(step.works)} | tokens
    for request in requests:
        said = bool(request.times_s)
        yield {
            "what": REQUEST,
            "number": request.number,
            "at_s": request.arrival_s,
            "seconds": request.times_s[-1] - request.arrival_s if said else None,
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": len(request.times_s),
            "begun_s": request.begun_s,
            "ttft_s": request.ttft_s if said else None,
            "tpot_s": request.tpot_s if said else None,
            "preemptions": request.preemptions,
        }


def write_rows(path: Path, trace: Trace, requests: Sequence[Request]) -> None:
    """Write them as CSV to ``path``, whole or not at all. Raises OSError."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(run_rows(trace, requests))
