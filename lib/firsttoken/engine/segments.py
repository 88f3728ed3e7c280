"""Layers [lo, hi) of a model: what hidden states go through, wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from firsttoken.engine.step_plan import StepPlan


class Segment(Protocol):
    """Consecutive ``layers`` of a model (0-based)."""

    layers: range

    def run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        """``hidden`` [1, tokens, hidden] through those of its layers that ``step`` runs -> the same shape."""

    def drop(self, request: int) -> None:
        """Forget the request of this number."""


class LocalSegment:
    """``modules`` in this process, the first of them layer ``lo``: stock decoder layers, adapted ones, or fused."""

    def __init__(self, modules: Sequence[nn.Module], lo: int = 0) -> None:
        self.modules = list(modules)  # one may be put in the place of another that computes the same, at any time
        self.layers = range(lo, lo + len(self.modules))

    def run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        args, keywords = step.arguments
        for layer in step.within(self.layers):
            if step.edges is not None:
                step.edges.enter(layer, hidden, step.works)
            hidden = self.modules[layer - self.layers.start](hidden, *args, **keywords)
        return hidden

    def drop(self, request: int) -> None:
        """Its keys and values are in the pool, and go with its blocks."""
