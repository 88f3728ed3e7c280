"""The primitive of the engine: tokens [a, b) of requests through layers [lo, hi), keys and values into the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from firsttoken.engine.attention import Attend
from firsttoken.engine.chances import prompt_rows
from firsttoken.engine.edges import Edges
from firsttoken.engine.kv import KVPool
from firsttoken.engine.work import Work

if TYPE_CHECKING:
    from firsttoken.engine.joined import Joined


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
        """Those of ``layers`` that this step runs."""
        return range(max(layers.start, self.layers.start), min(layers.stop, self.layers.stop))


def brought(works: Sequence[Work]) -> Tensor | None:
    """The hidden states [1, tokens, hidden] that redone ``works`` bring, end to end; None where the ids are all."""
    rows = [(work, work.redo.hidden) for work in works]
    if all(hidden is None for _, hidden in rows):
        return None
    return torch.cat([hidden[:, work.start : work.end] for work, hidden in rows], dim=1)
