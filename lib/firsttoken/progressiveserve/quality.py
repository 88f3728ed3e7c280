"""The quality of a stage: extractive and closed-book answers, four choices, running text.

One prefill of the prompt serves all three question scores: the choices are scored on copies of its KV cache, the greedy
answer is decoded on the cache itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.corpora import QAItem
from firsttoken.engine.sampling import argmax_tokens
from firsttoken.progressiveserve.samples import STOP, answer_tokens, qa_prompt, shortened
from firsttoken.scoring import exact_match, token_f1

# The KV cache of a model in which layers pass (ProgressiveServe, 3.4.1; errata I10).


class PrunedCache(DynamicCache):
    """A KV cache in which any layer may be a gap, the first one included.

    transformers asks layer 0 how many tokens the cache holds. Where layer 0 is a PassLayer it holds none,
    positions and mask come out as for an empty cache, and every decode step is silently wrong. Here the first layer
    that holds tokens answers.
    """

    def _filled_layer(self, layer_idx: int) -> int:
        filled = (i for i in range(len(self.layers)) if super(PrunedCache, self).get_seq_length(i) > 0)
        if layer_idx < len(self.layers) and super().get_seq_length(layer_idx) > 0:
            return layer_idx
        return next(filled, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, answered by the first filled layer when ``layer_idx`` is a gap."""
        return super().get_seq_length(self._filled_layer(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover, answered as in :meth:`get_seq_length`."""
        return super().get_mask_sizes(query_length, self._filled_layer(layer_idx))


Score: TypeAlias = Callable[[str, Sequence[str]], float]  # of an answer, by those that are right


@dataclass(frozen=True)
class AnswerConfig:
    """The settings for taking answers: the report decodes 10 tokens greedily, zero-shot (3.5.2)."""

    max_new_tokens: int = 10
    max_prompt_tokens: int = 384
    batch: int = 16


@torch.inference_mode()
def answer_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[QAItem],
    config: AnswerConfig,
    score: Score = exact_match,
) -> list[dict[str, Any]]:
    """One row an item: ``em``, which is by ``score``, and ``f1`` in 0..1, ``answer_nll`` in nats a token,
    ``choice_correct`` where it has choices.

    Items of like length share a batch; rows come back in the order of ``items``. Where the prompt did not fit, the row
    has ``cut_tokens``.
    """
    encoded = [tokenizer.encode(qa_prompt(item.passage, item.question)) for item in items]
    prompts = [shortened(ids, tokenizer, config.max_prompt_tokens) for ids in encoded]
    order = sorted(range(len(items)), key=lambda i: (len(prompts[i]), i))
    rows: dict[int, dict[str, Any]] = {}
    for first in range(0, len(order), config.batch):
        chosen = order[first : first + config.batch]
        scored = _score_batch(model, tokenizer, [items[i] for i in chosen], [prompts[i] for i in chosen], config, score)
        rows |= dict(zip(chosen, scored, strict=True))
    for i, (ids, prompt) in enumerate(zip(encoded, prompts, strict=True)):
        if len(ids) > len(prompt):
            rows[i]["cut_tokens"] = len(ids) - len(prompt)
    return [rows[i] for i in range(len(items))]


def _score_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[QAItem],
    prompts: Sequence[list[int]],
    config: AnswerConfig,
    score: Score,
) -> list[dict[str, Any]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    cache = PrunedCache()
    last = torch.tensor([width - 1], device=model.device)  # by number: of a slice torch copies the head once a prompt
    first = model(
        ids,
        attention_mask=mask,
        position_ids=_positions(mask),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=last,
    ).logits[:, 0]
    nll = _option_nll(model, tokenizer, items, first, cache, mask)
    texts = _decode(model, tokenizer, first, cache, mask, config.max_new_tokens)
    rows = []
    for item, text, losses in zip(items, texts, nll, strict=True):
        row = {
            "item": item.id,
            "prediction": text,
            "em": float(score(text, item.answers)),
            "f1": token_f1(text, item.answers),
            "answer_nll": losses[max(item.answer_index, 0)],
        }
        if item.choices:
            row["choice_correct"] = float(min(range(len(losses)), key=losses.__getitem__) == item.answer_index)
        rows.append(row)
    return rows


def _option_nll(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[QAItem],
    first: Tensor,
    cache: PrunedCache,
    mask: Tensor,
) -> list[list[float]]:
    """Mean negative log-likelihood a token, the stop included, of each item's choices after its prompt; of its first
    answer where it has none."""
    texts = [qa_prompt(item.passage, item.question) for item in items]
    options = [item.choices or item.answers[:1] for item in items]
    option_tokens = max(map(len, options))
    padded = [list(o) + [o[0]] * (option_tokens - len(o)) for o in options]
    encoded = [answer_tokens(tokenizer, text, o) for text, row in zip(texts, padded, strict=True) for o in row]
    width = max(map(len, encoded))
    ids = torch.tensor([e + [0] * (width - len(e)) for e in encoded], device=model.device)
    real = torch.tensor([[1] * len(e) + [0] * (width - len(e)) for e in encoded], device=model.device)
    full = torch.cat([mask.repeat_interleave(option_tokens, 0), real], 1)
    copied = copy.deepcopy(cache)
    copied.batch_repeat_interleave(option_tokens)
    later = model(
        ids, attention_mask=full, position_ids=_positions(full)[:, -width:], past_key_values=copied, use_cache=True
    ).logits
    logits = torch.cat([first.repeat_interleave(option_tokens, 0)[:, None], later[:, :-1]], 1).float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)
    means = ((losses * real).sum(1) / real.sum(1)).view(len(options), option_tokens).tolist()
    return [row[: len(o)] for row, o in zip(means, options, strict=True)]


def _decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    first: Tensor,
    cache: PrunedCache,
    mask: Tensor,
    max_new_tokens: int,
) -> list[str]:
    """Greedy answers: up to ``max_new_tokens`` tokens, cut at the end of the line. Raises OutputError for logits that
    are no finite numbers."""
    token, taken = argmax_tokens(first), []
    while True:
        taken.append(token)
        end = tokenizer.eos_token_id
        rows = [row[: row.index(end)] if end in row else row for row in torch.stack(taken, 1).tolist()]
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        ended = (STOP in t.lstrip() or len(row) < len(taken) for t, row in zip(texts, rows, strict=True))
        if len(taken) == max_new_tokens or all(ended):
            return [t.strip().split(STOP)[0].strip() for t in texts]
        mask = F.pad(mask, (0, 1), value=1)
        out = model(
            token[:, None],
            attention_mask=mask,
            position_ids=_positions(mask)[:, -1:],
            past_key_values=cache,
            use_cache=True,
        )
        token = argmax_tokens(out.logits[:, -1])


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.inference_mode()
def text_scores(model: PreTrainedModel, windows: Tensor, batch: int = 4) -> list[dict[str, Any]]:
    """One row a window of ``windows`` [count, length]: ``text_nll``, mean nats a token, of which perplexity is exp."""
    rows: list[dict[str, Any]] = []
    for part in windows.split(batch):
        ids = part.to(model.device)
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
        rows += [{"item": f"window-{len(rows) + i}", "text_nll": v} for i, v in enumerate(losses.mean(1).tolist())]
    return rows


def perplexity(rows: Iterable[dict[str, Any]]) -> float:
    """Return the exponential of the mean ``text_nll``."""
    losses = torch.tensor([r["text_nll"] for r in rows], dtype=torch.float64)
    return losses.mean().exp().item()
