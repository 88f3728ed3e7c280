"""Greedy answers of a batch whose prefix stands in a cache already, whoever computed it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.droidspeak.forward import Forward
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.engine.sampling import argmax_tokens
from firsttoken.study.errors import RequestError
from firsttoken_studies.droidspeak.reuse_items import STOP


@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prefix: Prefix,
    suffix: Sequence[Sequence[int]],
    cache: DynamicCache,
    max_new_tokens: int,
    stop: str = STOP,
) -> list[str]:
    """Return the answers of ``model`` after ``prefix`` and one row of token ids of ``suffix`` each, stripped.

    An answer ends before the model's end token, before ``stop`` ("": no such text; white space ahead of the answer does
    not count), or after ``max_new_tokens``. ``cache`` holds the prefix in every layer; it grows by what is computed and
    loses the rows whose answers have ended once those are half of them. Raises OutputError for logits that are no
    finite numbers, and RequestError when the suffixes are not one a row of the prefix, when one is empty, or when no
    token is asked.
    """
    if len(suffix) != prefix.ids.shape[0] or not all(suffix) or max_new_tokens < 1:
        raise RequestError(
            f"{len(suffix)} suffixes for {prefix.ids.shape[0]} prefixes and {max_new_tokens} new tokens: give each "
            "prefix one suffix that is not empty, and ask for a token or more"
        )
    # padded on the left: the last column is each row's last token, and the mask lets nothing see the gap
    opening = Prefix.of(suffix, prefix.ids.device)
    text, new = prefix.followed_by(opening.ids, opening.mask), opening.tokens
    stop_ids = model.generation_config.eos_token_id  # of which a model may have several
    stops = {tokenizer.eos_token_id, *(stop_ids if isinstance(stop_ids, list) else [stop_ids])} - {None}
    taken: list[list[int]] = [[] for _ in suffix]
    open_rows = list(range(len(suffix)))  # which row of the suffixes each row of the cache still answers
    for step in range(1, max_new_tokens + 1):
        forward = Forward(model, text, new)
        hidden = forward.run(forward.embed(), range(forward.depth), cache)
        token = argmax_tokens(forward.logits(hidden[:, -1:]))
        for row, token_id in zip(open_rows, token.flatten().tolist(), strict=True):
            taken[row].append(token_id)
        answers = _texts(tokenizer, [taken[row] for row in open_rows], stops)
        going = [
            index
            for index, (row, answer) in enumerate(zip(open_rows, answers, strict=True))
            if not (stops.intersection(taken[row]) or (stop and stop in answer))
        ]
        if not going or step == max_new_tokens:
            break
        if 2 * len(going) <= len(open_rows):  # a cache is copied to lose rows: not for every row that ends
            rows_kept = torch.tensor(going, device=token.device)
            cache.batch_select_indices(rows_kept)
            text, token, open_rows = text.rows(rows_kept), token[rows_kept], [open_rows[index] for index in going]
        text, new = text.followed_by(token), 1
    return [(answer.split(stop)[0] if stop else answer).strip() for answer in _texts(tokenizer, taken, stops)]


def _texts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]], stop_ids: set[int]) -> list[str]:
    """Decode each row of tokens up to the first of ``stop_ids``, without white space ahead of it."""
    before = [list(takewhile(lambda token: token not in stop_ids, row)) for row in rows]
    return [answer.lstrip() for answer in tokenizer.batch_decode(before, skip_special_tokens=True)]
