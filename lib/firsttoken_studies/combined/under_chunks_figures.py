"""What notebook 40 shows of a server under chunks, from a result alone."""

from __future__ import annotations

from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken_studies.combined.under_chunks import FIXED, STRETCHED


def under_chunks_rows(result: Result) -> Rows:
    """What streams notice of a long prompt, with a fixed budget and with steps that may be stretched so far."""
    found, config = result.summary, result.parameters["under_chunks"]
    named = {FIXED: f"{config['budget']} tokens", STRETCHED: f"stretched {config['stretch']:g} times"}
    return [
        {
            "steps": name,
            "P99 without the prompt, ms": interval(found.of("tbt_p99_ms", variant=way, case="plain"), 0),
            "P99 beside it, ms": interval(found.of("tbt_p99_ms", variant=way, case="beside"), 0),
            "times as long": interval(found.of("tbt_p99_x", variant=way, case="beside", than="plain"), 2),
            "goal": "1.3" if way == STRETCHED else "",
            "the prompt's first token, s": interval(found.of("ttft_p50_s", variant=way), 1),
            "tokens lost or doubled": found.value("tokens_wrong", variant=way),
        }
        for way, name in named.items()
    ]
