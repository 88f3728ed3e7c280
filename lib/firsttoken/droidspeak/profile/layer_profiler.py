"""One batch of questions, answered over many mixtures of two models' caches without computing anything twice.

A naive profile prefills once for every group, O(L^2) prefills of O(L) layers (DroidSpeak, 4.2). But the keys and values
that the receiver recomputes from a lower edge do not depend on where its group ends, and what enters a layer behind the
prefix does not depend on the layers above it. So the prefix is run once for every lower edge, and what follows it
through a tree of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from firsttoken.droidspeak.forward import Forward, cache_of, fill, layer_kv
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.prefill import full_prefill, group_input, spans
from firsttoken.droidspeak.prefix import LayerKV, Prefix
from firsttoken.engine.sampling import argmax_tokens

Item = tuple[Sequence[int], Sequence[int], Sequence[int]]  # token ids of a prefix, a suffix and a target


@dataclass(frozen=True)
class Questions:
    """A batch: what is shared, and what follows it (suffix and target, padded on the right)."""

    prefix: Prefix
    ids: Tensor  # [batch, width]
    mask: Tensor  # [batch, width], 0 where padded
    predicts: Tensor  # [batch, width], true where the next token is one of the target

    @classmethod
    def of(cls, items: Sequence[Item], device: torch.device | str = "cpu") -> Questions:
        """Stack ``items`` into one batch on ``device``."""
        rows = [[*suffix, *target] for _, suffix, target in items]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        column = torch.arange(width, device=device)
        start = torch.tensor([[len(suffix) - 1] for _, suffix, _ in items], device=device)
        end = torch.tensor([[len(row) - 1] for row in rows], device=device)
        prefix = Prefix.of([prefix for prefix, _, _ in items], device)
        return cls(prefix, ids, mask, (column >= start) & (column < end))


@dataclass(frozen=True)
class Score:
    """The scores of one mixture, one value an item of the batch.

    ``nll``: mean negative log-likelihood of the target's tokens, nats. ``accuracy``: share of them, the stop included,
    that are the most likely token where the ones before are given. ``deviation``: distance of the last layer's output
    from that over the receiver's own cache, relative to the latter's length.
    """

    nll: Tensor
    accuracy: Tensor
    deviation: Tensor


class LayerProfiler:
    """A batch of questions under one sender and one receiver; the sender's E-cache is kept at ``edges``."""

    def __init__(
        self, sender: PreTrainedModel, receiver: PreTrainedModel, questions: Questions, edges: Iterable[int]
    ) -> None:
        self.questions, self._sender = questions, sender
        self.sent = full_prefill(sender, questions.prefix, {edge for edge in edges if edge > 0})
        self._prefix = Forward(receiver, questions.prefix)
        with_questions = questions.prefix.followed_by(questions.ids, questions.mask)
        self._suffix = Forward(receiver, with_questions, new=questions.ids.shape[1])
        self.depth = self._suffix.depth
        self._scratch = cache_of([None] * self.depth)
        self._recomputed: dict[int, list[LayerKV]] = {}
        self.prefix_layers = self.depth  # layers that were run over a prefix so far, the sender's own included

    @cached_property
    def own(self) -> list[LayerKV]:
        """The receiver's own cache of the prefix."""
        return self.recomputed(Group(0, self.depth))

    @torch.inference_mode()
    def recomputed(self, group: Group) -> list[LayerKV]:
        """The receiver's keys and values of ``group``, from the sender's E-cache at its lower edge.

        Raises RequestError for a group that does not fit, or whose lower edge is none of ``edges``.
        """
        layers_kv = self._recomputed.get(group.check(self.depth).lo, [])
        if len(layers_kv) < len(group):
            cache = cache_of([None] * self.depth)
            self._prefix.run(group_input(self._prefix, self.sent, group), group.layers, cache)
            layers_kv = self._recomputed[group.lo] = [layer_kv(cache, i) for i in group.layers]
            self.prefix_layers += len(group)
        return layers_kv[: len(group)]

    def reuse(self) -> Score:
        """The score over the sender's cache as it is."""
        return self.over(self.sent.kv)

    def prefill(self) -> Score:
        """The score over the receiver's own cache."""
        return self._score(self._own_output)

    @torch.inference_mode()
    def sender_itself(self) -> Score:
        """Return the score of the sender over its own cache; its deviation says nothing."""
        behind = Forward(self._sender, self._suffix.prefix, new=self._suffix.new)
        hidden = behind.run(behind.embed(), range(self.depth), cache_of(self.sent.kv))
        return self._score(hidden, behind)

    def groups(self, edges: Sequence[int]) -> Iterator[tuple[Group, Score]]:
        """The score of every contiguous group whose ends are in ``edges`` (rising), and of reusing all layers."""
        yield NOTHING, self.reuse()
        below, layer_reached = self._suffix.embed(), 0
        for i, lo in enumerate(edges[:-1]):
            below, layer_reached = self._run_suffix(below, range(layer_reached, lo), self.sent.kv.__getitem__), lo
            recomputed = self.recomputed(Group(lo, edges[-1]))
            hidden, top = below, lo
            for hi in edges[i + 1 :]:
                hidden, top = (
                    self._run_suffix(
                        hidden, range(top, hi), lambda layer, lo=lo, recomputed=recomputed: recomputed[layer - lo]
                    ),
                    hi,
                )
                above = self._run_suffix(hidden, range(hi, self.depth), self.sent.kv.__getitem__)
                yield Group(lo, hi), self._score(above)
            if lo:  # what starts at the embedding is the receiver's own cache, which is asked for again
                del self._recomputed[lo]

    def single_layers(self) -> Iterator[tuple[int, Score]]:
        """The score where one layer alone holds the sender's keys and values and all others the receiver's own."""
        below = self._suffix.embed()
        for layer in range(self.depth):
            hidden = self._run_suffix(below, [layer], self.sent.kv.__getitem__)
            yield layer, self._score(self._run_suffix(hidden, range(layer + 1, self.depth), self.own.__getitem__))
            below = self._run_suffix(below, [layer], self.own.__getitem__)

    def scattered(self, layers: Iterable[int]) -> Score:
        """The score where ``layers`` are recomputed, each contiguous run of them from the sender's E-cache below it."""
        kv = list(self.sent.kv)
        for group in spans(layers):
            kv[group.lo : group.hi] = self.recomputed(group)
        return self.over(kv)

    def over(self, kv: Sequence[LayerKV]) -> Score:
        """The score over keys and values of the prefix that were made elsewhere, a layer each."""
        return self._score(self._run_suffix(self._suffix.embed(), range(self.depth), kv.__getitem__))

    @cached_property
    def _own_output(self) -> Tensor:
        return self._run_suffix(self._suffix.embed(), range(self.depth), self.own.__getitem__)

    @torch.inference_mode()
    def _run_suffix(self, hidden: Tensor, layers: Iterable[int], kv: Callable[[int], LayerKV]) -> Tensor:
        """Take ``hidden`` [batch, width, hidden] behind the prefix through ``layers`` over the cache ``kv``."""
        for layer in layers:
            fill(self._scratch, layer, kv(layer))
            hidden = self._suffix.run(hidden, [layer], self._scratch)
        return hidden

    @torch.inference_mode()
    def _score(self, hidden: Tensor, behind: Forward | None = None) -> Score:
        judged = self.questions.predicts
        wanted = self.questions.ids.roll(-1, 1)[judged]
        logits = (behind or self._suffix).logits(hidden[judged]).float()
        away = (hidden[judged].float() - self._own_output[judged].float()).norm(dim=-1)
        away = away / self._own_output[judged].float().norm(dim=-1)
        judged_tokens = judged.sum(1)

        def per_item(values: Tensor) -> Tensor:
            rows = torch.zeros(judged.shape, device=values.device)
            rows[judged] = values
            return rows.sum(1) / judged_tokens

        nll = per_item(F.cross_entropy(logits, wanted, reduction="none"))
        return Score(nll, per_item((argmax_tokens(logits) == wanted).float()), per_item(away))
