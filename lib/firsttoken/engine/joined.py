"""Works that are redone in some layers go through these together with a whole step: weights are read once for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firsttoken.engine.step_plan import StepPlan, brought
from firsttoken.engine.work import Work


@dataclass
class Joined:
    """``both`` runs the redone layers, for a whole step's works and those that are redone.

    ``entering`` [tokens of both] are its rows among the whole step's hidden states and, behind them, ``redone``
    [1, tokens, hidden]; ``whole`` [tokens of the whole step] are that step's rows among its own.
    """

    both: StepPlan
    redone: Tensor
    entering: Tensor
    whole: Tensor

    def enter(self, hidden: Tensor) -> Tensor:
        """The whole step's ``hidden`` [1, tokens, hidden] and those that are redone."""
        return torch.cat([hidden, self.redone], dim=1)[:, self.entering]

    def leave(self, hidden: Tensor) -> Tensor:
        """The whole step's of them."""
        return hidden[:, self.whole]


def join(step: StepPlan, works: Sequence[Work], plan: Callable[[Sequence[Work]], StepPlan]) -> None:
    """Let ``works``, all redone in the same layers from the hidden states that they bring, go with a whole ``step``.

    ``plan`` makes a step of works.
    """
    both = plan([*step.works, *works])
    both.layers = works[0].redo.layers
    first: dict[int, int] = {}
    end = 0
    for work in (*step.works, *works):
        first[work.request.number] = end
        end += work.tokens
    spans = [torch.arange(first[work.request.number], first[work.request.number] + work.tokens) for work in both.works]
    entering = torch.cat(spans).to(step.ids.device)
    whole = torch.argsort(entering)[: step.ids.shape[1]]
    step.joined = Joined(both, brought(works), entering, whole)
