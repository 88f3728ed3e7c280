"""A replica that takes over an answer which was begun before torch was there, with its lender's session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from firsttoken.engine.numpy_model import BLOCK_TOKENS
from firsttoken.engine.request import Sampling
from firsttoken.engine.torch_behind import TorchBehind
from firsttoken.link.shaped import Link
from firsttoken_extras.layer_borrowing.before_torch import LentModel
from firsttoken_extras.layer_borrowing.lender import NeighbourGone

if TYPE_CHECKING:
    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken.progressiveserve.loading.loader import StageLoad
    from firsttoken_extras.layer_borrowing.replica import BorrowingReplica


class OwnLayers(NamedTuple):
    """What computes with the layers of a ``load`` as they come."""

    load: StageLoad
    executor: LiveExecutor


class BorrowedAnswer(TorchBehind[OwnLayers]):
    """An answer of ``model``, whose files come over ``links``; a replica goes on with it and with its lender's session.

    Where the lender is gone, the replica begins with the tokens that were said, once all layers are here. ``replica``
    is None before it has taken over.
    """

    model: LentModel

    def __init__(self, model: LentModel, links: Sequence[Link]) -> None:
        super().__init__(model)
        self.replica: BorrowingReplica | None = None
        self._links = links

    def close(self) -> None:
        """End the replica or, before there is one, the session with the lender; what still reads stops."""
        (self.model.lent if self.replica is None else self.replica).close()
        self.model.weights.close()

    def _before(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        with suppress(NeighbourGone):
            yield from super()._before(prompt, count)

    def _make(self) -> OwnLayers:
        from firsttoken.engine.decoder import LocalSegment
        from firsttoken.engine.live_executor import LiveExecutor
        from firsttoken.lean.build import build_lean
        from firsttoken.progressiveserve.loading.loader import StageLoad
        from firsttoken.progressiveserve.loading.meta_model import MetaModel
        from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder
        from firsttoken.study.dtypes import named
        from firsttoken_extras.layer_borrowing import replica  # noqa: F401 it is imported here, too

        weights = self.model.weights
        folder, manifest = weights.folder, weights.manifest
        meta = MetaModel(folder, manifest, "cpu", named(self.model.dtype), build_lean)
        builder = WeightBuilder(manifest, [1], weights.read(), meta.device, meta.dtype)
        load = StageLoad(folder, manifest, [1], self._links, meta, meta.empty_view(), builder=builder)
        load.view.activate(meta.model)
        blocks = -(-self.model.context // BLOCK_TOKENS) + 1
        options = {"segments": [LocalSegment(load.view.layers)], "device": meta.device, "touched": False}
        return OwnLayers(load, LiveExecutor(meta.model, blocks, **options))

    def _go_on(self, made: OwnLayers, tokens: list[int], count: int) -> Iterator[int]:
        import torch

        from firsttoken_extras.layer_borrowing.arrivals import follow
        from firsttoken_extras.layer_borrowing.lease import Lease
        from firsttoken_extras.layer_borrowing.replica import BorrowingReplica

        lent, depth = self.model.lent, len(made.load.view.layers)
        asked, session = lent.lending, lent.handed_over()
        access = {"access": asked.access, "timeouts": asked.timeouts}
        lease = Lease([asked.lender], asked.model, depth, asked.width, **access, begun=session)
        if session is None:
            lease.close(lent.gone)
        replica = self.replica = BorrowingReplica(made.executor, made.load.view.layers, follow(made.load, depth), lease)
        with torch.inference_mode():
            request = (replica.take_over if session else replica.submit)(tokens, Sampling(count))
        while not request.finished:
            with torch.inference_mode():
                said = replica.step()
            for _, token in said:
                yield token
        if request.failure is not None:
            raise request.failure
