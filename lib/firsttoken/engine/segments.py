"""Layers [lo, hi) of a model: what hidden states go through, wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from firsttoken.engine.step_plan import StepPlan
from firsttoken.study.errors import ModelError


class Segment(Protocol):
    """Consecutive ``layers`` of a model (0-based)."""

    layers: range

    def run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        """``hidden`` [1, tokens, hidden] through those of its layers that ``step`` runs -> the same shape."""

    def drop(self, request: int) -> None:
        """Forget the request of this number."""


def check_cover(segments: Sequence[Segment], layers: range) -> None:
    """Raise ModelError unless ``segments``, one behind the other, have each of ``layers`` once and in order."""
    reached = layers.start
    for segment in segments:
        within = range(max(segment.layers.start, layers.start), min(segment.layers.stop, layers.stop))
        if len(within) and within.start == reached:
            reached = within.stop
        elif len(within):
            break
    else:
        if reached == max(layers.start, layers.stop):
            return
    held = ", ".join(f"[{one.layers.start}, {one.layers.stop})" for one in segments)
    raise ModelError(f"the segments {held} are not the model's layers [{layers.start}, {layers.stop}) in order")


class LocalSegment:
    """``modules`` in this process, the first of them layer ``lo``: stock decoder layers, adapted ones, or fused."""

    def __init__(self, modules: Sequence[nn.Module], lo: int = 0) -> None:
        self.modules = list(modules)  # one may be put in the place of another that computes the same, at any time
        self._lo = lo

    @property
    def layers(self) -> range:
        """Those that are here."""
        return range(self._lo, self._lo + len(self.modules))

    def run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        args, keywords = step.arguments
        for layer in step.within(self.layers):
            if step.edges is not None:
                step.edges.enter(layer, hidden, step.works)
            hidden = self.modules[layer - self._lo](hidden, *args, **keywords)
        return hidden

    def drop(self, request: int) -> None:
        """Its keys and values are in the pool, and go with its blocks."""
