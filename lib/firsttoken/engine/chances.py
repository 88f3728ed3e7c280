"""How likely the model thought what was said: logarithms of shares, as OpenAI's interface reports them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from firsttoken.engine.work import Work
from firsttoken.study.errors import OutputError

LEAST = -9999.0  # stands for the logarithm of 0, which no JSON can carry


class Chance(NamedTuple):
    """Of a token: the natural logarithm of the share that the model gave it, before temperature and nucleus.

    ``likeliest`` are (token id, logarithm) of those that the model gave the largest shares, the largest first. No
    logarithm is below ``LEAST``.
    """

    logprob: float
    likeliest: tuple[tuple[int, float], ...]


def chance(logits: torch.Tensor, token: int, most: int) -> Chance:
    """Of ``token`` under ``logits`` [vocabulary], with the ``most`` likeliest."""
    shares = logits.float().log_softmax(-1).clamp(min=LEAST)
    values, ids = shares.topk(min(most, len(shares)))
    return Chance(float(shares[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def no_number() -> OutputError:
    """Why a request ends whose logits are no finite numbers."""
    return OutputError(
        "the model's output is no finite number; copy its weights again, or let it compute in a wider dtype"
    )


def prompt_rows(work: Work) -> range:
    """The places of a prompt whose logits are kept, as they say how likely the token behind each is.

    None where nobody asked, or where they were kept before: a request that was preempted reads its prompt again.
    """
    request = work.request
    if not request.sampling.prompt_logprobs or work.redo is not None:
        return range(0)
    return range(max(work.start, len(request.prompt_chances)), min(work.end, request.prompt_tokens - 1))


def read_prompts(logits: torch.Tensor, works: Sequence[Work]) -> None:
    """Note the chances of prompts' tokens; ``logits`` [rows, vocabulary] are those of :func:`prompt_rows` in turn. A
    request that has one which is no finite number has a ``failure``."""
    largest, row = logits.max(-1).values.tolist() if len(logits) else [], 0
    for work in works:
        request = work.request
        for place in prompt_rows(work):
            most = request.sampling.logprobs or 0
            if not math.isfinite(largest[row]):
                request.failure = no_number()
            request.prompt_chances.append(chance(logits[row], request.tokens[place + 1], most))
            row += 1
