"""The trace that an observer of the engine keeps, and the files that it is written to."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from firsttoken.engine.preemption.preemption_policy import Recovery
from firsttoken.engine.request import Kind, Request, ScheduledChunk, TokenSpan
from firsttoken.study.files import replacing, write_text


@dataclass(frozen=True)
class Step:
    """One step as it was: ``prefills`` are (cached, new) tokens, ``contexts`` the cached tokens of each decode.

    These are shapes, which costs hang on; ``chunks`` are what they are the shapes of.
    """

    at_s: float
    seconds: float
    prefills: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    chunks: Sequence[ScheduledChunk]

    @property
    def token_spans(self) -> tuple[TokenSpan, ...]:
        """Return the token spans that the step processed, of every request."""
        return tuple(span for chunk in self.chunks for span in chunk.token_spans)

    @property
    def tokens(self) -> dict[Kind, int]:
        """Return the number of tokens of each kind."""
        tokens = dict.fromkeys(Kind, 0)
        for span in self.token_spans:
            tokens[span.kind] += span.end - span.start
        return tokens


@dataclass(frozen=True)
class DecodeChunks(Sequence[ScheduledChunk]):
    """The chunks of a step in which each of ``requests`` decoded with so many tokens in the cache, made when read."""

    requests: Sequence[Request]
    contexts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.contexts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return DecodeChunks(self.requests[index], self.contexts[index])
        cached = self.contexts[index]
        return ScheduledChunk(self.requests[index], cached, cached + 1, cached)


@dataclass
class Trace:
    """Every step and every recovery, in their order."""

    steps: list[Step] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)


# A run as one tidy table: a line an iteration and a line a request, told apart by ``what``.

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
        yield row | {"requests": len(step.chunks)} | _sizes(step)
    for request in requests:
        answered = bool(request.times_s)
        yield {
            "what": REQUEST,
            "number": request.number,
            "at_s": request.arrival_s,
            "seconds": request.times_s[-1] - request.arrival_s if answered else None,
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": len(request.times_s),
            "begun_s": request.begun_s,
            "ttft_s": request.ttft_s if answered else None,
            "tpot_s": request.tpot_s if answered else None,
            "preemptions": request.preemptions,
        }


def write_rows(path: Path, trace: Trace, requests: Sequence[Request]) -> None:
    """Write the rows of :func:`run_rows` as CSV to ``path``, whole or not at all. Raises OSError."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(run_rows(trace, requests))


# A run for viewers of traces: Chrome's (chrome://tracing) and Perfetto's (ui.perfetto.dev) open what is written here.
#
# The format is Google's Trace Event Format: a complete event ("X") has a begin and a duration in microseconds, an
# instant ("i") a begin, and metadata ("M") name and order the rows.

DEVICE, REQUESTS = 0, 1  # "processes" of the viewer: one has one row, the other one a request


def write_trace(path: Path, trace: Trace, requests: Sequence[Request]) -> None:
    """Write what ``trace_events`` gives to ``path``, whole or not at all. Raises OSError."""
    content = {"displayTimeUnit": "ms", "traceEvents": list(trace_events(trace, requests))}
    write_text(path, json.dumps(content, separators=(",", ":")))


def trace_events(trace: Trace, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
    """One row for the device, with every step, and one a request: its waiting, and what each step did for it.

    Times are from the first arrival on. A request is preempted at an instant; what undoes it is in its next events.
    """
    moments = [request.arrival_s for request in requests] + [step.at_s for step in trace.steps]
    start_s = min(moments, default=0.0)
    yield from _row(DEVICE, 0, "device", "steps")
    for step in trace.steps:
        yield _span(DEVICE, 0, _label(step), step.at_s - start_s, step.seconds, _sizes(step))
    for request in requests:
        yield from _row(REQUESTS, request.number, "requests", f"request {request.number}")
        until_s = request.arrival_s if request.begun_s is None else request.begun_s
        sizes = {"prompt_tokens": request.prompt_tokens, "output_tokens": len(request.times_s)}
        at_s, waited_s = request.arrival_s - start_s, until_s - request.arrival_s
        yield _span(REQUESTS, request.number, "waits", at_s, waited_s, sizes)
    for step in trace.steps:
        for number, lines in groupby(step.token_spans, lambda span: span.request):
            done = {str(line.kind): f"tokens {line.start} to {line.end - 1}" for line in lines}
            yield _span(REQUESTS, number, " + ".join(done), step.at_s - start_s, step.seconds, done)
    for recovery in trace.recoveries:
        yield {
            "ph": "i",
            "s": "t",
            "pid": REQUESTS,
            "tid": recovery.request,
            "name": "preempted",
            "ts": _microseconds(recovery.preempted_at_s - start_s),
            "args": {"back by": str(recovery.action), "reason": recovery.reason, "tokens": recovery.tokens},
        }


def _label(step: Step) -> str:
    parts = []
    if step.prefills:
        parts.append(f"prefill of {sum(new for _, new in step.prefills)} tokens")
    if step.contexts:
        parts.append(f"{len(step.contexts)} decodes")
    return ", ".join(parts)


def _sizes(step: Step) -> dict[str, int]:
    return {f"{kind}_tokens": count for kind, count in step.tokens.items()}


def _row(process: int, row: int, called: str, name: str) -> Iterator[dict[str, Any]]:
    for key, args in (
        ("process_name", {"name": called}),
        ("process_sort_index", {"sort_index": process}),
        ("thread_name", {"name": name}),
        ("thread_sort_index", {"sort_index": row}),
    ):
        yield {"ph": "M", "pid": process, "tid": row, "name": key, "args": args}


def _span(process: int, row: int, name: str, at_s: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    begin = _microseconds(at_s)
    # the end is rounded, not the length: what follows at once must not seem to overlap
    length = round(_microseconds(at_s + seconds) - begin, 3)
    return {"ph": "X", "pid": process, "tid": row, "name": name, "ts": begin, "dur": length, "args": args}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
