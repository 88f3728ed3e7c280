"""Whose answers a window gave: the warm whole model's, to the token or but for rounding, or another model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from firsttoken.scoring import token_f1


class Judge:
    """The whole ``model``, which is asked what it would have said; ``decode`` makes words of tokens."""

    def __init__(self, model: nn.Module, decode: Callable[[Sequence[int]], str]) -> None:
        self._model, self._decode = model, decode
        self._known: dict[tuple[int, ...], float] = {}

    def of(
        self, asked: Sequence[Mapping[str, Any]], said: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """What is known of the answers ``said``, a list by request: whether the tokens are those that are ``wanted``,
        as far as the answer goes, the largest :meth:`shortfall`, and F1 of the words.

        Two ways to compute one model round differently, and where two tokens are almost equally good, either may win.
        All that is said afterwards answers other words. The shortfall tells this from another model's answer.
        """
        pairs = list(zip(said, wanted, strict=True))
        return {
            "same": [list(one) == list(other)[: len(one)] for one, other in pairs],
            "shortfall": [
                round(self.shortfall(one["prompt"], tokens), 4) for one, tokens in zip(asked, said, strict=True)
            ],
            "f1": [round(token_f1(self._decode(one), [self._decode(other)]), 4) for one, other in pairs],
        }

    @torch.inference_mode()
    def shortfall(self, prompt: Sequence[int], said: Sequence[int]) -> float:
        """By how much the logit of a token of ``said`` lies below the largest one after the same words, at most: 0 for
        what the model says itself, and where nothing was said."""
        if not said:
            return 0.0
        whole = (len(prompt), *prompt, *said)
        if whole not in self._known:  # most arms give most answers of the warm replica, and a pass takes a second
            ids = torch.tensor([[*prompt, *said[:-1]]])
            logits = self._model(ids, use_cache=False, logits_to_keep=len(said)).logits[0].float()
            chosen = logits.gather(1, torch.tensor(list(said))[:, None])[:, 0]
            self._known[whole] = float((logits.max(-1).values - chosen).max())
        return self._known[whole]
