"""Greedy tokens, and what to hold them against: a token that wins by a rounding error decides no test.

Two ways to compute the same logits in fp32 (with a cache or without, alone or in a batch, stock or fused) differ by up
to 4e-5 in models whose logits reach 10. Where the two largest lie nearer together than that, either may win, and what
is said afterwards answers other words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-3  # of a logit; 25 times what was seen, and a thousandth of what a wrong cache does


@dataclass(frozen=True)
class Plain:
    """Tokens of a reference, and its logits [tokens, vocabulary] at the place of each of them."""

    tokens: list[int]
    logits: Tensor

    @property
    def margin(self) -> float:
        """By how much the largest logit exceeds the second at least."""
        first, second = self.logits.topk(2).values.unbind(-1)
        return float((first - second).min())

    def exact(self) -> list[int]:
        """The tokens, for tests that compare them or their text exactly.

        Raises AssertionError where one of them is a near tie: such a test wants another prompt.
        """
        assert self.margin > TOLERANCE, f"a token wins by {self.margin:.1e} only: choose another prompt"
        return self.tokens


@torch.inference_mode()
def generated(model: nn.Module, prompt: Sequence[int], count: int, **options: Any) -> Plain:
    """What plain ``generate`` of transformers says to one prompt; ``options`` are its own."""
    ids = torch.tensor([list(prompt)])
    asked = {"max_new_tokens": count, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **(asked | options))
    return Plain(said.sequences[0, ids.shape[1] :].tolist(), torch.cat(said.logits).float())


@torch.inference_mode()
def judged(model: nn.Module, prompt: Sequence[int], said: Sequence[int]) -> Plain:
    """``said`` with the logits that ``model`` has, without a cache, after all that was said before each token.

    To hold ``said`` to it is to compare every token, as none is judged by other words than its own.
    """
    logits = model(torch.tensor([[*prompt, *said[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return Plain(list(said), logits.float())


def check_greedy(said: Sequence[int], plain: Plain, tolerance: float = TOLERANCE) -> int:
    """Hold ``said`` to a reference; how many tokens of it were compared.

    A token is wrong if the reference's logits have a larger one by more than ``tolerance``. After another token than
    the reference's that is not wrong, nothing can be compared any more. Raises AssertionError for a wrong token, and
    for too few or too many.
    """
    largest = plain.logits.max(-1)
    for place, (token, own) in enumerate(zip(said, plain.tokens, strict=False)):
        lost = float(largest.values[place] - plain.logits[place, token])
        if lost > tolerance:
            wins = int(largest.indices[place])
            raise AssertionError(f"token {place} is {token}, but {wins} wins by {lost:.2g}: {list(said)}")
        if token != own:
            return place + 1
    assert len(said) == len(plain.tokens), f"{len(said)} tokens for {len(plain.tokens)}"
    return len(said)
