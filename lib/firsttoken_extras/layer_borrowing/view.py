"""The model as a replica has it at one moment: its own layers, and behind them those that others run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor, nn

from firsttoken.engine.decoder import Decoder
from firsttoken.engine.edges import Edges
from firsttoken.engine.request import Request
from firsttoken.engine.segments import LocalSegment
from firsttoken.engine.step_plan import StepPlan
from firsttoken.engine.views import View
from firsttoken.petals.wire import Stretch
from firsttoken.study.errors import RequestError
from firsttoken_extras.layer_borrowing.loan import Loan

if TYPE_CHECKING:  # a lean start needs none of it
    from transformers import PreTrainedModel


class BorrowedSegment:
    """``layers`` of a model, the last of them its last, on ``loan``; ``over`` is done when own ones are here."""

    def __init__(self, loan: Loan, layers: range, over: Future[None]) -> None:
        self.layers = layers
        self._loan, self._over = loan, over

    def run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        """``hidden`` [1, tokens, hidden] through all of its layers -> the same shape.

        What enters it is kept by a step that ends before it, too: that of layers that have come, of all that was said
        before. Raises NeighbourGone as ``Loan.run``, RequestError for a step through a part of it.
        """
        first, through = self.layers.start, step.within(self.layers)
        if step.layers.stop >= first:
            step.edges.enter(first, hidden, step.works)
        if not len(through):
            return hidden
        if through != self.layers:
            raise RequestError(f"a step through [{through.start}, {through.stop}) of borrowed layers, which run as one")
        stretches = [Stretch(work.request.number, work.start, work.end) for work in step.works]
        return self._loan.run(first, stretches, step.edges, self._over)[None].to(hidden.device)

    def drop(self, request: int) -> None:
        """Forget the request of this number, here and there."""
        self._loan.forget(request)


class BorrowingView(View):
    """``model`` with its first ``here`` of ``layers`` from here and the others on ``loan``."""

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[nn.Module], here: int, loan: Loan, over: Future[None]
    ) -> None:
        borrowed = BorrowedSegment(loan, range(here, len(layers)), over)
        own = [LocalSegment(layers[:here])] if here else []
        super().__init__(Decoder(model, [*own, borrowed]), Edges([here]))

    def take_over(self, request: Request) -> None:
        """Go on with what the lenders have of it; what entered the layers that were borrowed before is done with."""
        request.view.edges.drop(request.number)
