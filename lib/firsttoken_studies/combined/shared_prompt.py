"""A prompt that many requests share: what is prefilled, and how long the last first token takes."""

from __future__ import annotations

from contextlib import closing

from transformers import PreTrainedModel

from firsttoken.engine.config import EngineConfig
from firsttoken.engine.engine import Engine
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.study.record import Rows


def shared_prompt(model: PreTrainedModel, *, requests: int, tokens: int, rounds: int) -> Rows:
    """Rows {round, shared, prefilled_tokens, seconds} of ``requests`` whose first ``tokens`` tokens are the same."""
    beginning = [7 * place % model.config.vocab_size for place in range(tokens)]
    prompts = [[*beginning, number] for number in range(requests)]
    rows: Rows = []
    with closing(LiveExecutor(model, requests * (tokens // 16 + 2))) as executor:
        for number in range(-1, rounds):
            for shared in (True, False):
                engine = Engine(executor, EngineConfig(watermark=0.0, requests=requests, share_prefixes=shared))
                served = engine.serve([(prompt, Sampling(1), 0.0) for prompt in prompts])
                took = max(request.times_s[0] for request in served) - min(request.begun_s for request in served)
                if number >= 0:
                    count = engine.books["prefill"]
                    rows.append({"round": number, "shared": shared, "prefilled_tokens": count, "seconds": took})
    return rows
