"""The primitive of the engine: tokens [a, b) of requests through layers [lo, hi), keys and values into the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from firsttoken.engine.attention import Attend
from firsttoken.engine.hidden_state_cache import Edges
from firsttoken.engine.kv import KVPool
from firsttoken.engine.request import Work
from firsttoken.engine.sampling import prompt_rows

if TYPE_CHECKING:
    pass


@dataclass
class StepPlan:
    """``works`` laid end to end, those of fewer tokens first, and what every layer needs to know of them.

    Of ``layers`` those run that are there; ``hidden`` [1, tokens, hidden] enters the first of them, or what the model
    makes of the ids. ``edges``, if given, keep what enters theirs. ``paged`` reads and writes the pool. Others are
    ``joined`` to a step through all layers in some of these.
    """

    works: tuple[Work, ...]
    ids: Tensor  # [1, tokens]
    positions: Tensor  # [1, tokens]
    last: Tensor  # [works, and more]: the row of each work's last token, then those of prompts to be judged
    paged: Attend
    layers: range
    hidden: Tensor | None = None
    edges: Edges | None = None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = field(default=((), {}))  # of every layer, by the model's code
    joined: Joined | None = None

    @classmethod
    def of(cls, works: Sequence[Work], pool: KVPool, attend: type[Attend], edges: Edges | None = None) -> StepPlan:
        """``works`` on the device of ``pool``, through all layers."""
        batch = sorted(works, key=lambda work: work.tokens)
        ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        last: list[int] = []
        judged: list[int] = []
        size = pool.shape.block_tokens
        for work in batch:
            request, new = work.request, range(work.start, work.end)
            judged += [len(ids) + place - work.start for place in prompt_rows(work)]
            ids += request.tokens[work.start : work.end]
            positions += new
            blocks += [request.blocks[position // size] for position in new]
            last.append(len(ids) - 1)
        device, where = pool.device, torch.tensor(positions)
        return cls(
            works=tuple(batch),
            ids=torch.tensor([ids], device=device),
            positions=where[None].to(device),
            last=torch.tensor(last + judged, device=device),
            paged=attend(pool, batch, torch.tensor(blocks, device=device), (where % size).to(device)),
            layers=range(pool.shape.layers),
            edges=edges,
        )

    def redo(self, layers: range) -> None:
        """Run ``layers`` only, from the hidden states that the works bring for the first of them."""
        self.layers = layers
        self.hidden = brought(self.works)

    def through(self, layers: range) -> StepPlan:
        """The same through other ``layers``."""
        return replace(self, layers=layers)

    def within(self, layers: range) -> range:
        """Return those of ``layers`` that this step runs."""
        return range(max(layers.start, self.layers.start), min(layers.stop, self.layers.stop))


def brought(works: Sequence[Work]) -> Tensor | None:
    """The hidden states [1, tokens, hidden] that redone ``works`` bring, end to end; None where the ids are all."""
    rows = [(work, work.redo.hidden) for work in works]
    if all(hidden is None for _, hidden in rows):
        return None
    return torch.cat([hidden[:, work.start : work.end] for work, hidden in rows], dim=1)


# Works that are redone in some layers go through these together with a whole step: weights are read once for both.


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
