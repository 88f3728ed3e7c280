"""What the keys and values of a request are made of, told from outside the engine, and the logits that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from layered import Layered
from torch import Tensor

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefix import PrefixCache
from firsttoken.engine.request import Phase, Request


@dataclass(frozen=True)
class Course:
    """``stage`` computed it all, but for the first ``brought`` tokens where a ``group`` is given: these are a
    sender's in all other layers. Then, with so many tokens cached, later stages computed some layers of them again
    (``redone``).

    ``kept`` are the layers at which the hidden states of all tokens are known.
    """

    stage: int
    kept: frozenset[int]
    group: Group | None = None
    brought: int = 0
    redone: tuple[tuple[int, range, int], ...] = ()

    @property
    def plain(self) -> bool:
        """Whether one stage computed everything."""
        return self.group is None and not self.redone


@dataclass(frozen=True)
class Standing:
    """How far a request was before stages were published."""

    cached: int
    afresh: bool  # what it holds cannot be moved: it is in the host, shared, on its way, or about an earlier change

    @classmethod
    def of(cls, request: Request, *, shares: bool, awaits: bool) -> Standing:
        away = request.phase is Phase.SWAPPED or request.redo is not None or awaits
        return cls(request.cached, shares or away or not request.cached)


@dataclass(frozen=True)
class Rules:
    """What each stage lacks (its layers in order), and by which policy open requests move."""

    lacks: Sequence[Sequence[int]]
    depth: int
    policy: str

    def keeps(self, stage: int) -> frozenset[int]:
        """Layers whose input is kept under ``stage``; every stage lacks one run of layers at most."""
        kept = self.policy in ("from boundary states", "partial prefill")
        return frozenset(self.lacks[stage - 1][:1] if kept else ())

    def own(self, stage: int) -> Course:
        return Course(stage, self.keeps(stage))

    def brought(self, stage: int, group: Group, tokens: int) -> Course:
        kept = frozenset(layer for layer in self.keeps(stage) if layer in group)
        return Course(stage, kept, group, tokens)

    def moved(self, course: Course, old: int, new: int, standing: Standing) -> Course:
        """What ``course`` is after its request, then under stage ``old``, moved to ``new``."""
        came = sorted(set(self.lacks[old - 1]) - set(self.lacks[new - 1]))
        if standing.afresh or self.policy in ("prefill again", "naive") or came[0] not in course.kept:
            return self.own(new)
        layers = range(came[0], self.depth if self.policy == "from boundary states" else came[-1] + 1)
        kept = frozenset(layer for layer in self.keeps(new) if layer in layers or layer in course.kept)
        return replace(course, kept=kept, redone=(*course.redone, (standing.cached, layers, new)))


def logits_of(course: Course, stages: Sequence, sent: PrefixCache, tokens: list[int], answers: int) -> Tensor:
    """Logits [answers, vocabulary] before each of the last ``answers`` of ``tokens``, by layers run one after another.

    ``stages`` are the models; those before what ``course`` was last about are of no meaning.
    """
    at, stage, so_far = 0, course.stage, Layered()
    every = range(stages[0].config.num_hidden_layers)
    if course.group is not None:
        at, group = course.brought, course.group
        for layer in set(every) - set(group.layers):
            so_far.kv[layer] = tuple(part[..., :at, :] for part in sent.kv[layer])
        edge = sent.e_cache[group.lo][:, :at] if group.needs_e_cache else None
        so_far.run(stages[stage - 1], tokens[:at], 0, group.layers, edge)
    for cached, layers, better in course.redone:
        if cached > at:
            so_far.run(stages[stage - 1], tokens[:cached], at, every)
        so_far.run(stages[better - 1], tokens[:cached], 0, layers, so_far.entered[layers.start])
        at, stage = cached, better
    model = stages[stage - 1]
    hidden = so_far.run(model, tokens[:-1], at, every)
    logits = model.lm_head(model.model.norm(hidden))[0]
    missing = answers - len(logits)
    return logits[-answers:] if missing <= 0 else torch.cat([logits.new_zeros(missing, logits.shape[1]), logits])
