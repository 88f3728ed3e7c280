"""A scheduler as a profile names it: "sarathi 512" is Sarathi with a budget of 512 tokens."""

from __future__ import annotations

from firsttoken.chunked.capacity import Objective
from firsttoken.engine.config import EngineConfig
from firsttoken.study.errors import ProfileError

TTFT_S = 2.0  # of schedulers that have an objective for it: the delay that the paper allows


def engine_config(text: str, objective: Objective, requests: int) -> EngineConfig:
    """The engine of ``text``, for ``objective``, with up to ``requests`` at once; watermark as in vLLM.

    Raises ProfileError for an unknown scheduler, or a budget that is no number.
    """
    name, _, budget = text.partition(" ")
    if budget and not budget.isdigit():
        raise ProfileError(f"scheduler {text!r}: write the name and, where it has one, the token budget")
    chosen = {"token_budget": int(budget)} if budget else {}
    return EngineConfig(scheduler=name, requests=requests, tbt_s=objective.tbt_s, ttft_s=TTFT_S, **chosen)
