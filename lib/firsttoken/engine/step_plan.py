"""The primitive of the engine: tokens [a, b) of requests through layers [lo, hi), keys and values into the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from firsttoken.engine.accelerator import JoinedLayers
from firsttoken.engine.attention import Attend
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.kv import KVPool
from firsttoken.engine.request import ScheduledChunk


@dataclass
class StepPlan:
    """``chunks`` laid end to end, those of fewer tokens first, and what every layer needs to know of them.

    Of ``layers`` those run that are there; ``hidden`` [1, tokens, hidden] enters the first of them, or what the model
    makes of the ids, and ``leaving`` has left the last. ``hidden_cache``, if given, keeps what enters theirs. ``paged``
    reads and writes the pool. Others are ``fused_recompute`` to a step through all layers in some of these. Its tokens
    may be of several ``variants`` of the model, all of whose layers then run in one call.
    """

    chunks: tuple[ScheduledChunk, ...]
    ids: Tensor  # [1, tokens]
    positions: Tensor  # [1, tokens]
    last: Tensor  # [chunks, and more]: each chunk's last token, then prompts and drafts to be judged
    paged: Attend
    layers: range
    hidden: Tensor | None = None
    leaving: Tensor | None = None
    hidden_cache: HiddenStateCache | None = None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = field(default=((), {}))  # of every layer, by the model's code
    fused_recompute: FusedRecompute | None = None
    variants: tuple[JoinedLayers, Tensor] | None = None  # and, int64 [tokens], to which of them a token belongs

    @classmethod
    def of(
        cls,
        chunks: Sequence[ScheduledChunk],
        pool: KVPool,
        attend: type[Attend],
        hidden_cache: HiddenStateCache | None = None,
    ) -> StepPlan:
        """``chunks`` on the device of ``pool``, through all layers."""
        # Attention takes the chunks of few tokens, decodes above all, in one call: their rows have to come first.
        batch = sorted(chunks, key=lambda chunk: chunk.tokens)
        ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        last: list[int] = []
        judged: list[int] = []
        size = pool.shape.block_tokens
        for chunk in batch:
            request, new = chunk.request, range(chunk.start, chunk.end)
            for positions_judged in (chunk.logprob_positions, chunk.draft_positions):
                judged += [len(ids) + position - chunk.start for position in positions_judged]
            ids += request.tokens[chunk.start : chunk.end]
            positions += new
            blocks += [request.blocks[position // size] for position in new]
            last.append(len(ids) - 1)
        device, position_ids = pool.device, torch.tensor(positions)
        return cls(
            chunks=tuple(batch),
            ids=torch.tensor([ids], device=device),
            positions=position_ids[None].to(device),
            last=torch.tensor(last + judged, device=device),
            paged=attend(pool, batch, torch.tensor(blocks, device=device), (position_ids % size).to(device)),
            layers=range(pool.shape.layers),
            hidden_cache=hidden_cache,
        )

    def redo(self, layers: range) -> None:
        """Run ``layers`` only, from the hidden states that the chunks bring for the first of them."""
        self.layers = layers
        self.hidden = recompute_inputs(self.chunks)

    def leave(self) -> None:
        """Give the chunks that go on with it later what has left the layers."""
        first = 0
        for chunk in self.chunks:
            if chunk.redo.leave is not None:
                chunk.redo.leave(chunk.start, self.leaving[0, first : first + chunk.tokens])
            first += chunk.tokens

    def through(self, layers: range) -> StepPlan:
        """Return this step through other ``layers``."""
        return replace(self, layers=layers)

    def within(self, layers: range) -> range:
        """Return those of ``layers`` that this step runs."""
        return range(max(layers.start, self.layers.start), min(layers.stop, self.layers.stop))


def recompute_inputs(chunks: Sequence[ScheduledChunk]) -> Tensor | None:
    """The hidden states [1, tokens, hidden] that redone ``chunks`` bring, end to end; None where the ids are all."""
    rows = [(chunk, chunk.redo.hidden) for chunk in chunks]
    if all(hidden is None for _, hidden in rows):
        return None
    return torch.cat([hidden[:, chunk.start : chunk.end] for chunk, hidden in rows], dim=1)


# Chunks that are redone in some layers go through these together with a whole step: weights are read once for both.


@dataclass
class FusedRecompute:
    """``both`` runs the redone layers, for a whole step's chunks and those that are redone.

    ``entering`` [tokens of both] are its rows among the whole step's hidden states and, behind them, ``redone``
    [1, tokens, hidden]; ``full_rows`` [tokens of the whole step] are that step's rows among its own.
    """

    both: StepPlan
    redone: Tensor
    entering: Tensor
    full_rows: Tensor

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the whole step's ``hidden`` [1, tokens, hidden] and the states that are redone, as rows of
        ``both``."""
        return torch.cat([hidden, self.redone], dim=1)[:, self.entering]

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the whole step's rows of ``hidden``, in their own order."""
        return hidden[:, self.full_rows]


def fuse_recompute(
    step: StepPlan, chunks: Sequence[ScheduledChunk], plan: Callable[[Sequence[ScheduledChunk]], StepPlan]
) -> None:
    """Let ``chunks``, all redone in the same layers from the hidden states that they bring, go with a whole ``step``.

    ``plan`` makes a step of chunks.
    """
    both = plan([*step.chunks, *chunks])
    both.layers = chunks[0].redo.layers
    first: dict[int, int] = {}
    end = 0
    for chunk in (*step.chunks, *chunks):
        first[chunk.request.number] = end
        end += chunk.tokens
    spans = [
        torch.arange(first[chunk.request.number], first[chunk.request.number] + chunk.tokens) for chunk in both.chunks
    ]
    entering = torch.cat(spans).to(step.ids.device)
    # ``entering`` names each row once, so sorting it gives the way back; the whole step's rows have the lowest numbers.
    order = torch.argsort(entering)[: step.ids.shape[1]]
    step.fused_recompute = FusedRecompute(both, recompute_inputs(chunks), entering, order)
