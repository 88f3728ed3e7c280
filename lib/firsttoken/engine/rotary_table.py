"""Rotary angles that are there before a step: to take a few positions' own costs 0.02 ms, to compute them 0.09."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BY_POSITION = ("default", "linear", "llama3", "yarn")  # kinds that depend on the position alone
_FEWEST = 1024  # positions that are computed at once, in 0.3 ms: a first token waits for them


class RotaryTable:
    """Cosines and sines of positions in ``dtype`` on ``device``, as ``rotary`` has them: of the first ``tokens``, and
    of more when these are asked for.

    Where they depend on more than the position (transformers: ``dynamic_rope_update``), ``rotary`` is asked each time.
    """

    def __init__(self, rotary: nn.Module, dtype: torch.dtype, device: torch.device, tokens: int = 0) -> None:
        self._rotary, self._dtype, self._device = rotary, dtype, device
        self._fixed = getattr(rotary, "rope_type", None) in _BY_POSITION
        self._tokens = 0
        self._halves: tuple[Tensor, ...] = ()
        if tokens and self._fixed:
            self._compute(tokens)

    def lookup(self, hidden: Tensor, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, tokens, head_dim] of ``positions`` [1, tokens], which are below ``end``, in the dtype
        of ``hidden``."""
        if not self._fixed:
            return self._rotary(hidden, positions)
        if end > self._tokens:
            self._compute(max(end, 2 * self._tokens, _FEWEST))
        cos, sin = self._halves
        return cos.index_select(1, positions[0]), sin.index_select(1, positions[0])

    def _compute(self, tokens: int) -> None:
        positions = torch.arange(tokens, device=self._device)[None]
        self._halves = self._rotary(torch.empty(0, dtype=self._dtype, device=self._device), positions)
        self._tokens = tokens
