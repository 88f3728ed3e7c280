"""Greedy answers of a batch whose prefix stands in a cache already, whoever computed it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.kvreuse.forward import Forward
from firsttoken.kvreuse.prefix import Prefix
from firsttoken.kvreuse.tasks.items import STOP
from firsttoken.study.errors import RequestError


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
    """What ``model`` says after ``prefix`` and one row of token ids of ``suffix`` each, stripped.

    An answer ends before the model's end token, before ``stop`` ("": no such text; white space ahead of the answer does
    not count), or after ``max_new_tokens``. ``cache`` holds the prefix in every layer and grows by what is computed.
    Raises RequestError when the suffixes are not one a row of the prefix, when one is empty, or when no token is asked.
    """
    if len(suffix) != prefix.ids.shape[0] or not all(suffix) or max_new_tokens < 1:
        raise RequestError(
            f"{len(suffix)} suffixes for {prefix.ids.shape[0]} prefixes and {max_new_tokens} new tokens: give each "
            "prefix one suffix that is not empty, and ask for a token or more"
        )
    # padded on the left: the last column is each row's last token, and the mask lets nothing see the gap
    opening = Prefix.of(suffix, prefix.ids.device)
    text, new = prefix.followed_by(opening.ids, opening.mask), opening.tokens
    ends, taken = _end_tokens(model, tokenizer), []
    while True:
        forward = Forward(model, text, new)
        hidden = forward.run(forward.embed(), range(forward.depth), cache)
        token = forward.logits(hidden[:, -1:]).argmax(-1)
        taken.append(token)
        rows = [_before(row, ends) for row in torch.cat(taken, 1).tolist()]
        texts = [answer.lstrip() for answer in tokenizer.batch_decode(rows, skip_special_tokens=True)]
        done = (len(row) < len(taken) or (stop and stop in answer) for row, answer in zip(rows, texts, strict=True))
        if len(taken) == max_new_tokens or all(done):
            return [(answer.split(stop)[0] if stop else answer).strip() for answer in texts]
        text, new = text.followed_by(token), 1


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids that end an answer: the tokenizer's, and the model's, of which there may be several."""
    own = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}


def _before(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens before the first of ``ends``."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:at]
