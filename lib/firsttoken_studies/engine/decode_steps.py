"""What a step of decoding takes, by how many requests are in it and how long their contexts are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from torch import nn
from tqdm import tqdm

from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.request import GREEDY, Request
from firsttoken.engine.work import Work
from firsttoken.study.record import Rows

BLOCK_TOKENS = 16


def decode_rows(model: nn.Module, batches: Sequence[int], contexts: Sequence[int], repeats: int, seed: int) -> Rows:
    """Rows {what: "decode", requests, context, repeat, ms}, in random order; a first round warms up.

    The keys and values of the contexts are the zeros of a fresh pool: how long attention takes hangs on how many there
    are, not on what they hold.
    """
    rng = random.Random(seed)
    each = -(-(max(contexts) + 1) // BLOCK_TOKENS)
    executor = LiveExecutor(model, max(batches) * each, block_tokens=BLOCK_TOKENS)
    cases, rows = list(product(batches, contexts)), []
    try:
        for repeat in tqdm(range(-1, repeats), desc="decode steps", unit="round", disable=None):
            for count, context in rng.sample(cases, len(cases)):
                works = [_decoding(number, context, each, executor.limits.vocabulary, rng) for number in range(count)]
                start = executor.now()
                executor.execute(works)
                ms = (executor.now() - start) * 1e3
                if repeat >= 0:
                    rows.append({"what": "decode", "requests": count, "context": context, "repeat": repeat, "ms": ms})
    finally:
        executor.close()
    return rows


def _decoding(number: int, context: int, blocks: int, vocabulary: int, rng: random.Random) -> Work:
    """A request of blocks of its own with all but its last token cached."""
    request = Request(number, [rng.randrange(vocabulary)] * context, GREEDY, 0.0)
    request.append(rng.randrange(vocabulary), 0.0)
    request.advance(context)
    request.blocks = list(range(number * blocks, (number + 1) * blocks))
    return request.work()
