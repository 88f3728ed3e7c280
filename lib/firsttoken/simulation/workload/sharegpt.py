"""The report's workload: as many short conversations of ShareGPT as long ones, all at once (001, 4.1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from firsttoken.engine.workload_items import Item
from firsttoken.simulation.workload.conversations import conversations
from firsttoken.study.errors import CorpusError, RequestError

LONGEST = 2048  # tokens of a conversation, prompt and answer (CPS 4.1)


def threshold_mix(
    tokenizer: Any | None,
    short: int = 100,
    long: int = 100,
    *,
    threshold: int = 1024,
    total: tuple[int, int] = (128, LONGEST),
    seed: int = 0,
    scale: float = 1.0,
) -> tuple[Item, ...]:
    """``short`` conversations of up to ``threshold`` tokens and ``long`` longer ones, all at 0, in random order.

    A conversation's tokens are prompt and answer together; those outside ``total`` (both ends included) are left out.
    ``seed`` draws without replacement from the whole pinned file.
    Without a ``tokenizer`` (random weights) the lengths are those of the pinned model's, and items have no token ids.

    ``scale`` below 1 is for live runs on a small machine: 0.25 turns the defaults into totals of 32 to 512 and a
    threshold of 256. Kept are the conversations that a seed draws and their order, who is short and who is long, and,
    to a token's rounding, the share of prompt in a total and the ratio of one total to another. Not kept are the ends
    of the prompts, which are cut off, and whatever is not in proportion to length: attention's quadratic share, the
    rounding up to whole KV blocks, and what a step, a copy or a request costs however short it is.

    Raises RequestError for numbers that make no workload, CorpusError when the file has too few such conversations.
    """
    classes = _classes(short, long, threshold, total, scale)
    pool = conversations(tokenizer)
    totals = pool.prompt_tokens + pool.output_tokens
    rng = np.random.default_rng(seed)
    items = []
    for count, least, most in classes:
        (fitting,) = np.nonzero((least <= totals) & (totals <= most))
        if len(fitting) < count:
            raise CorpusError(
                f"{len(fitting):,} conversations have {least} to {most} tokens and {count:,} are asked for; "
                "ask for fewer"
            )
        bounds = _scaled_bounds(least, most, scale)
        for index in rng.choice(fitting, size=count, replace=False):
            items.append(_scaled(pool.item(index), scale, *bounds))
    return tuple(items[item_index] for item_index in rng.permutation(len(items)))


def _classes(short: int, long: int, threshold: int, total: tuple[int, int], scale: float) -> list[tuple[int, int, int]]:
    """(how many, least tokens, most tokens) of the short and of the long ones."""
    least, most = total
    if min(short, long) < 0 or short + long < 1:
        raise RequestError(f"no mix has {short} short and {long} long requests; ask for at least one")
    if not 2 <= least <= threshold < most:
        raise RequestError(
            f"a threshold of {threshold} tokens does not part totals of {least} to {most}; choose one between them"
        )
    if not 0 < scale <= 1:
        raise RequestError(f"lengths cannot be scaled by {scale}; scale is above 0 and at most 1")
    classes = [(short, least, threshold), (long, threshold + 1, most)]
    for _, *bounds in classes:
        low, high = _scaled_bounds(*bounds, scale)
        if low > high:
            raise RequestError(f"scaled by {scale}, no length is left for totals of {bounds[0]} to {bounds[1]} tokens")
    return classes


def _scaled_bounds(least: int, most: int, scale: float) -> tuple[int, int]:
    """The whole numbers from ``scale`` x least to ``scale`` x most; a prompt and an answer need 2."""
    return max(2, math.ceil(scale * least)), math.floor(scale * most)


def _scaled(item: Item, scale: float, low: int, high: int) -> Item:
    total = min(max(round(item.total_tokens * scale), low), high)
    prompt = min(max(round(item.prompt_tokens * scale), 1), total - 1)
    return Item(item.arrival_s, prompt, total - prompt, item.prompt[:prompt])
