"""Chooses tokens by logits: greedy for all at once, draws one request at a time from its own generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from firsttoken.engine.accelerator import accelerator
from firsttoken.engine.draws import accept_draft, choose, token_shares
from firsttoken.engine.request import MIN_LOGPROB, ScheduledChunk, TokenLogprob
from firsttoken.study.errors import OutputError

# How likely the model thought what was said: logarithms of shares, as OpenAI's interface reports them.


def token_logprob(logits: torch.Tensor, token: int, most: int) -> TokenLogprob:
    """Return the chance of ``token`` under ``logits`` [vocabulary], with the ``most`` likeliest tokens."""
    shares = logits.float().log_softmax(-1).clamp(min=MIN_LOGPROB)
    values, ids = shares.topk(min(most, len(shares)))
    return TokenLogprob(float(shares[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def no_number() -> OutputError:
    """Return the error that ends a request whose logits are no finite numbers."""
    return OutputError(
        "the model's output is no finite number; copy its weights again, or let it compute in a wider dtype"
    )


def read_prompts(logits: torch.Tensor, chunks: Sequence[ScheduledChunk]) -> None:
    """Note the chances of prompts' tokens, and verify drafts; ``logits`` [rows, vocabulary] are those of their
    ``logprob_positions`` and ``draft_positions`` in turn. A request that has one which is no finite number has a
    ``failure``."""
    largest, row = logits.max(-1).values.tolist() if len(logits) else [], 0
    for chunk in chunks:
        request = chunk.request
        for position in chunk.logprob_positions:
            most = request.sampling.logprobs or 0
            if not math.isfinite(largest[row]):
                request.failure = no_number()
            request.prompt_logprobs.append(token_logprob(logits[row], request.tokens[position + 1], most))
            row += 1
        request.correction = None  # of a step that failed
        row = _verify(logits, largest, row, chunk)


def _verify(logits: torch.Tensor, largest: Sequence[float], row: int, chunk: ScheduledChunk) -> int:
    """Note as the request's ``correction`` the first draft of ``chunk`` that the whole model would not have said, by
    ``logits`` [rows, vocabulary] from ``row`` on; return the row behind them."""
    request, sampling, positions = chunk.request, chunk.request.sampling, chunk.draft_positions
    first = len(request.tokens) - request.draft_count
    for offset, position in enumerate(positions, start=row):
        draft, tokens = request.tokens[position + 1], request.tokens[: position + 1]
        generated = len(tokens) - request.prompt_tokens
        if not math.isfinite(largest[offset]):
            request.failure = no_number()
            break
        values = logits[offset].double().cpu().numpy()
        if request.draft_shares:
            shares = token_shares(values, sampling, tokens, sampling.drawn + generated)
            token = accept_draft(draft, request.draft_shares[position + 1 - first], shares, request.generator)
        else:
            token = choose(values, sampling, tokens, sampling.drawn + generated, sampling.numbers(generated))
        if sampling.logprobs is not None:
            likelihood = token_logprob(logits[offset], token, sampling.logprobs)
            request.token_logprobs[generated:] = [likelihood]  # and not behind those of a step that failed
        if token != draft:
            request.correction = position + 1, token
            break
    return row + len(positions)


def next_tokens(logits: torch.Tensor, chunks: Sequence[ScheduledChunk]) -> list[int]:
    """The token after each of ``chunks`` from its ``logits`` [chunks, vocabulary].

    A partial chunk draws nothing: what a request says must not hang on how its prompt was cut. Where the largest logit
    is no finite number the request has a ``failure`` instead of a token.
    """
    tokens, largest = (ids_and_maxima.tolist() for ids_and_maxima in accelerator().argmax(logits))
    for row, chunk in enumerate(chunks):
        request, sampling = chunk.request, chunk.request.sampling
        if not chunk.completes or request.correction is not None:
            continue
        if not math.isfinite(largest[row]):
            request.failure = no_number()
            continue
        if sampling.temperature > 0 or sampling.adjusts:
            values, generated = logits[row].double().cpu().numpy(), len(request.tokens) - request.prompt_tokens
            tokens[row] = choose(values, sampling, request.tokens, sampling.drawn + generated, request.generator)
            if request.drafting and sampling.temperature > 0 and sampling.verify == "distribution":
                shares = token_shares(values, sampling, request.tokens, sampling.drawn + generated)
                request.draft_shares[request.draft_count :] = [shares.astype("float32")]
        if sampling.logprobs is not None and not request.drafting:
            request.token_logprobs.append(token_logprob(logits[row], tokens[row], sampling.logprobs))
    return tokens


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The token of the largest of ``logits`` [..., vocabulary], the first of equals. Raises OutputError where that is
    no finite number."""
    best = logits.max(-1)
    if not best.values.isfinite().all():
        raise no_number()
    return best.indices
