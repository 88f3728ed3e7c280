"""Transitions: what a generation that is running computes again when layers appear (the report leaves it open; errata
I9).

Keys and values of earlier tokens were computed by the pruned model: new layers have none of them, and those of every
layer above a new one, or under another adapter, are no longer what the better model would have computed. A policy says
which layers a request computes again; the engine does it, under the budgets of its steps, beside everybody else.
A request that is to be verified (``firsttoken.engine.drafts``) moves so up to the last stage, which holds all that was
drafted to what it would have said itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import ClassVar

from firsttoken.progressiveserve.loading.views import StageView, changed
from firsttoken.progressiveserve.passlayer import PassLayer

NOTHING = range(0)


class Transition(ABC):
    """A policy: what a request does again when a better stage arrives."""

    name: ClassVar[str]

    def keep(self, view: StageView) -> tuple[int, ...]:
        """The layers whose input is kept of every request under ``view``."""
        return ()

    @abstractmethod
    def redo(self, old: StageView, new: StageView) -> range | None:
        """The layers whose keys and values are computed again by ``new``; None where a request stays with ``old``."""


class RequestBoundary(Transition):
    """A transition in which a request ends under the stage it began with; both stages serve meanwhile, for they share
    their weights."""

    name = "request boundary"

    def redo(self, old: StageView, new: StageView) -> None:
        """Return None: a request stays with the stage it began with."""


class PrefillAgain(Transition):
    """A transition in which all keys and values are computed again by the better stage."""

    name = "prefill again"

    def redo(self, old: StageView, new: StageView) -> range:
        """Return all layers, whatever changed."""
        return range(len(new.layers))


class FromBoundary(Transition):
    """Hidden states at the lowest missing layer are kept; from there on everything is computed again.

    Only layers from the kept one upwards are run; where no loaded layer lies above the new ones, these are all that
    is run. Right only while everything below is unchanged: an adapter that changes with the stage touches every
    layer, and then this is :class:`PrefillAgain`.
    """

    name = "from boundary states"

    def keep(self, view: StageView) -> tuple[int, ...]:
        """The lowest layer that is still passed."""
        return _missing(view)[:1]

    def redo(self, old: StageView, new: StageView) -> range:
        """Return the layers from the kept boundary on, or all of them where something below it changed."""
        different, depth = changed(old, new), len(new.layers)
        if not different:
            return NOTHING
        boundaries = self.keep(old)
        return range(boundaries[0] if boundaries and boundaries[0] <= different.start else 0, depth)


class ChangedLayers(Transition):
    """Partial prefill (DroidSpeak, 4): only the layers that changed are computed again, from the hidden states that the
    pruned stage had there; those above keep the pruned stage's keys and values, which are not quite right.

    The pruned stage is the sender, the better one the receiver. An adapter that changes with the stage touches every
    layer, and then this is :class:`PrefillAgain`.
    """

    name = "partial prefill"

    def keep(self, view: StageView) -> tuple[int, ...]:
        """Return the layers at which a run of missing layers begins."""
        missing = _missing(view)
        return missing[:1] + tuple(high for low, high in pairwise(missing) if high > low + 1)

    def redo(self, old: StageView, new: StageView) -> range:
        """Return the layers from the first that changed to the last."""
        different = changed(old, new)
        if not different or different.start in self.keep(old):
            return different
        return range(0, different.stop)


class Naive(Transition):
    """A transition in which the better stage goes on with the old keys and values, and new layers begin with none.
    Wrong, and silently so."""

    name = "naive"

    def redo(self, old: StageView, new: StageView) -> range:
        """Return no layers, as only the layers change."""
        return NOTHING


TRANSITIONS = {
    policy.name: policy for policy in (RequestBoundary(), PrefillAgain(), FromBoundary(), ChangedLayers(), Naive())
}


def _missing(view: StageView) -> tuple[int, ...]:
    return tuple(i for i, layer in enumerate(view.layers) if isinstance(layer, PassLayer))
