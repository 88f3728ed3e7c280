"""What notebook 40 shows of a server under chunks, from a result alone."""

from __future__ import annotations

from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.together.under_chunks import FIXED, STRETCHED


def under_chunks_rows(result: Result) -> Rows:
    """What streams notice of a long prompt, with a fixed budget and with steps that may be stretched so far."""
    config = result.parameters["under_chunks"]
    named = {FIXED: f"{config['budget']} tokens", STRETCHED: f"stretched {config['stretch']:g} times"}
    return [
        {
            "steps": name,
            "P99 without the prompt, ms": interval(result.summary[f"{way}_plain_tbt_p99_ms"], 0),
            "P99 beside it, ms": interval(result.summary[f"{way}_beside_tbt_p99_ms"], 0),
            "times as long": interval(result.summary[f"{way}_over_plain_x"], 2),
            "goal": "1.3" if way == STRETCHED else "",
            "the prompt's first token, s": interval(result.summary[f"{way}_prompt_ttft_s"], 1),
            "tokens lost or doubled": result.summary[f"{way}_tokens_wrong"]["value"],
        }
        for way, name in named.items()
    ]
