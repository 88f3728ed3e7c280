"""A replica that answers from its ends on: the layers that have not come are run by others that have them.

Between two steps it takes over what has come. The keys and values of these layers are computed again from the hidden
states that entered the first of them, which were kept, in pieces under the budget of the steps; those of the layers
above stay with their lenders. Every token is the whole model's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor, nn

from firsttoken.engine.accelerator import accelerator
from firsttoken.engine.decoder import Decoder, LocalSegment
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.preemption.preemption_policy import PreemptionPolicy
from firsttoken.engine.request import GREEDY, Request, Sampling
from firsttoken.engine.step_plan import StepPlan
from firsttoken.engine.trace import Trace
from firsttoken.petals.messages import SequenceChunk
from firsttoken.study.errors import RequestError, SwarmError
from firsttoken_cpu.native.exports import WeightMemory, packed_in
from firsttoken_extras.layer_borrowing.arrivals import LayerArrivals
from firsttoken_extras.layer_borrowing.lease import Lease
from firsttoken_extras.layer_borrowing.lender import NeighbourGone
from firsttoken_extras.layer_borrowing.prefix_offer import PrefixOffer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The model as a replica has it at one moment: its own layers, and behind them those that others run.


class BorrowedSegment:
    """``layers`` of a model, the last of them its last, on ``lease``; ``returned`` is done when own ones are here."""

    def __init__(self, lease: Lease, layers: range, returned: Future[None]) -> None:
        self.layers = layers
        self._lease, self._returned = lease, returned

    def run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        """``hidden`` [1, tokens, hidden] through all of its layers -> the same shape.

        What enters it is kept by a step that ends before it, too: that of layers that have come, of all that was said
        before. Raises NeighbourGone as ``Lease.run``, RequestError for a step through a part of it.
        """
        first, through = self.layers.start, step.within(self.layers)
        # Behind a group that ends with the model a step goes through no layer: what it has then entered none of these.
        if step.layers.start <= first <= step.layers.stop:
            step.hidden_cache.enter(first, hidden, step.chunks)
        if not len(through):
            return hidden
        if through != self.layers:
            raise RequestError(f"borrowed layers run as one, not [{through.start}, {through.stop}) of them")
        chunks = [SequenceChunk(chunk.request.number, chunk.start, chunk.end) for chunk in step.chunks]
        return self._lease.run(first, chunks, step.hidden_cache, self._returned)[None].to(hidden.device)

    def drop(self, request: int) -> None:
        """Forget the request of this number, here and at the lenders."""
        self._lease.forget(request)


class BorrowingVersion(ModelVersion):
    """``model`` with those of ``layers`` before ``first_borrowed`` from here, and the others on ``lease``."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[nn.Module],
        first_borrowed: int,
        lease: Lease,
        returned: Future[None],
    ) -> None:
        borrowed = BorrowedSegment(lease, range(first_borrowed, len(layers)), returned)
        local_segments = [LocalSegment(layers[:first_borrowed])] if first_borrowed else []
        super().__init__(Decoder(model, [*local_segments, borrowed]), HiddenStateCache([first_borrowed]))

    def adopt(self, request: Request) -> None:
        """Go on with what the lenders have of it; what entered the layers that were borrowed before is done with."""
        request.version.hidden_cache.drop(request.number)


CONFIG = EngineConfig(scheduler="sarathi")


def as_they_come(come: int, depth: int) -> int:
    """Return how many layers to compute here of the ``depth``, of which ``come`` have come: all that have."""
    return come


class BorrowingReplica:
    """``layers`` of the model of ``executor``, whose weights come as ``arrivals`` says, and ``lease`` until then.

    Layers are fused as they are taken over, as a lender's are: what either computes of a token is the same. The
    caller's model keeps its plain ones, so that the weights are there twice. Layers that nobody lends are waited for
    before anything is computed, and where a lender refuses or is gone, all are: a start without borrowing.
    ``take_over`` says how many of those that have come are taken, ``taken`` are (seconds on the executor's clock, own
    layers from then on). ``policy`` and ``trace`` are the engine's: of a request that is swapped out the keys and
    values of own layers go to the host, those of borrowed ones stay with their lenders, and what entered these is kept
    here, should a lender lose them. Raises SwarmError for shared prefixes.
    """

    def __init__(
        self,
        executor: LiveExecutor,
        layers: Sequence[nn.Module],
        arrivals: LayerArrivals,
        lease: Lease,
        config: EngineConfig = CONFIG,
        *,
        policy: PreemptionPolicy | None = None,
        trace: Trace | None = None,
        take_over: Callable[[int, int], int] = as_they_come,
    ) -> None:
        if config.share_prefixes:
            raise SwarmError("a replica that borrows layers cannot share prefixes; leave share_prefixes out")
        self.lease = lease
        self.taken: list[tuple[float, int]] = []
        self.engine = Engine(executor, config, policy=policy, trace=trace)
        self._executor, self._layers, self._arrivals = executor, list(layers), arrivals
        self._take_over = take_over
        self._open: list[Request] = []
        self._arrived_layers = lease.first
        self._ready = False  # once the model's ends are here, and the layers that nobody lends
        # A huge page is cleared before it is written to, for which a virtual machine may wait 5 ms: with 14 MB a layer
        # and one core, a token waited for up to 0.7 s while layers were taken over.
        self._panels = WeightMemory(huge=False)
        executor.version = self._view()

    @property
    def here(self) -> int:
        """Return the number of own layers that steps run through now."""
        return self._arrived_layers

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        arrival_s: float | None = None,
        *,
        offer: PrefixOffer | None = None,
    ) -> Request:
        """A request that goes with the layers as they come, and takes what it can now of ``offer``: where that is
        nothing, its ``fell_back`` says why. Raises RequestError as ``Engine.submit``."""
        source, why = (None, "") if offer is None else offer.source_at(self._arrived_layers, len(self._layers))
        request = self.engine.submit(prompt, sampling, arrival_s, moves=True, source=source)
        request.fell_back = why
        self._open.append(request)
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Take over what has come, and process one batch; the tokens it produced, as ``Engine.step``.

        Waits for the ends and the layers that nobody lends, for all of them when a lender is gone. Raises what ended
        the load.
        """
        if self._arrived_layers < len(self._layers):
            self._arrivals.wait(len(self._layers) if self.lease.gone else self.lease.first)
            if not self._ready:  # nothing was computed yet
                self._executor.version, self._ready = self._ready_view(), True
            come, depth = self._arrivals.layers, len(self._layers)
            own_layers = come if self.lease.gone else self._take_over(come, depth)
            self._switch_to(max(self._arrived_layers, own_layers))
        try:
            return self.engine.step()
        except NeighbourGone:  # the step has left nothing behind, and is taken again without it
            return []

    def run(self) -> None:
        """Step until no request is open."""
        while self.engine.busy:
            self.step()

    def settle(self) -> None:
        """Wait for all layers, take them over and let the lenders go. Raises what ended the load."""
        self._arrivals.wait(len(self._layers))
        while self._arrived_layers < len(self._layers) or any(request.redo for request in self._open):
            self._switch_to(len(self._layers))
            if self.engine.busy:
                self.step()

    def close(self) -> None:
        """End what is open, and the sessions with the lenders."""
        for request in self._open:
            self.engine.cancel(request)
        self.lease.close("the replica was closed")
        self._executor.close()

    def _switch_to(self, come: int) -> None:
        """Compute with the first ``come`` layers from here on, once nobody is about earlier ones."""
        self._open = [request for request in self._open if not request.finished]
        complete = come == len(self._layers)
        if come == self._arrived_layers or (any(map(self._between, self._open)) and not (complete and self.lease.gone)):
            return
        before, self._arrived_layers = self._arrived_layers, come
        lost = self.engine.publish(self._ready_view(), lambda *_: range(before, come))
        self.taken.append((self._executor.now(), come))
        if complete:
            self.lease.close()
        if lost:
            raise lost[0][1]

    def _between(self, request: Request) -> bool:
        """Return whether ``request`` computes layers again, or has computed upon a prefix that is still on its way: if
        it moved then, it would have to compute all of it."""
        return request.redo is not None or (request.version is not None and self.engine.awaits_prefix(request))

    def _ready_view(self) -> ModelVersion:
        """The model as it is now, with its own layers fused. Its head is packed when all of them are here: before the
        first token it would take longer than to multiply it."""
        with packed_in(self._panels):
            layers = self._layers[: self._arrived_layers]  # fused ones stay as they are
            self._layers[: self._arrived_layers] = map(accelerator().fuse_layer, layers)
            version = self._view()
            if self._arrived_layers == len(self._layers):
                version.decoder.pack_head()
                threading.Thread(target=self._panels.collapse, name="huge pages", daemon=True).start()
        return version

    def _view(self) -> ModelVersion:
        model, layers = self._executor.model, self._layers
        if self._arrived_layers == len(layers):
            return ModelVersion(Decoder(model, [LocalSegment(layers)]))
        return BorrowingVersion(model, layers, self._arrived_layers, self.lease, self._arrivals.over)
