"""What becomes of a generation that is running when layers appear (the report leaves it open; errata I9).

Keys and values of earlier tokens were computed by the pruned model: new layers have none of them, and those of every
layer above a new one, or under another adapter, are no longer what the better model would have computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from firsttoken.progressive.loading.views import StageView, lowest_changed
from firsttoken.progressive.passlayer import PassLayer
from firsttoken.progressive.recovery.contexts import Context
from firsttoken.study.errors import StageError


class Transition(ABC):
    """A policy: carries a context over to a better stage between two tokens."""

    name: ClassVar[str]

    def keep(self, view: StageView) -> int | None:
        """The layer whose input a context under ``view`` must keep; None for nothing."""
        return None

    @abstractmethod
    def carry(self, context: Context, view: StageView) -> None:
        """Change ``context`` so that its next token comes from ``view``, or leave it as it is."""


class RequestBoundary(Transition):
    """A request ends under the stage it began with; both stages serve meanwhile, for they share their weights."""

    name = "request boundary"

    def carry(self, context: Context, view: StageView) -> None:
        """Nothing changes, and nothing is stalled."""


class PrefillAgain(Transition):
    """All keys and values are computed again by the better stage."""

    name = "prefill again"

    def carry(self, context: Context, view: StageView) -> None:
        """One prefill of the whole context."""
        context.prefill_again(view)


class FromBoundary(Transition):
    """Hidden states at the lowest missing layer are kept; from there on everything is computed again.

    Only layers from the kept one upwards are run; where no loaded layer lies above the new ones, these are all that
    is run. Right only while everything below is unchanged: an adapter that changes with the stage touches every
    layer, and then this is :class:`PrefillAgain`.
    """

    name = "from boundary states"

    def keep(self, view: StageView) -> int | None:
        """The lowest layer that is still passed."""
        missing = (i for i, layer in enumerate(view.layers) if isinstance(layer, PassLayer))
        return next(missing, None)

    def carry(self, context: Context, view: StageView) -> None:
        """Recompute from the kept boundary, or everything where something below it changed."""
        lowest = lowest_changed(context.view, view)
        if lowest >= len(view.layers):
            context.view = view
        elif context.keep is None or lowest < context.keep:
            context.prefill_again(view)
        else:
            context.recompute_from(view, context.keep)


class Naive(Transition):
    """The better stage goes on with the old keys and values; new layers begin with none. Wrong, and silently so."""

    name = "naive"

    def carry(self, context: Context, view: StageView) -> None:
        """Only the layers change."""
        context.view = view


TRANSITIONS = {policy.name: policy for policy in (RequestBoundary(), PrefillAgain(), FromBoundary(), Naive())}


def find_transition(name: str) -> Transition:
    """The policy called ``name``. Raises StageError when there is none."""
    if name not in TRANSITIONS:
        raise StageError(f"no transition policy {name!r}; known: {', '.join(TRANSITIONS)}")
    return TRANSITIONS[name]
