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
        self, requests: Sequence[Mapping[str, Any]], outputs: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """Judge the answers ``outputs``, a list by request: whether the tokens are those that are ``wanted``, as far as
        the answer goes, the largest :meth:`shortfall`, and F1 of the words.

        Two ways to compute one model round differently, and where two tokens are almost equally good, either may win.
        All that is said afterwards answers other words. The shortfall tells this from another model's answer.
        """
        pairs = list(zip(outputs, wanted, strict=True))
        return {
            "same": [list(output) == list(other)[: len(output)] for output, other in pairs],
            "shortfall": [
                round(self.shortfall(request["prompt"], tokens), 4)
                for request, tokens in zip(requests, outputs, strict=True)
            ],
            "f1": [round(token_f1(self._decode(output), [self._decode(other)]), 4) for output, other in pairs],
        }

    @torch.inference_mode()
    def shortfall(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """By how much the logit of a token of ``output`` lies below the largest one after the same words, at most: 0
        for what the model says itself, and where nothing was said."""
        if not output:
            return 0.0
        sequence = (len(prompt), *prompt, *output)
        if sequence not in self._known:  # most arms give most answers of the warm replica, and a pass takes a second
            ids = torch.tensor([[*prompt, *output[:-1]]])
            logits = self._model(ids, use_cache=False, logits_to_keep=len(output)).logits[0].float()
            chosen = logits.gather(1, torch.tensor(list(output))[:, None])[:, 0]
            self._known[sequence] = float((logits.max(-1).values - chosen).max())
        return self._known[sequence]
