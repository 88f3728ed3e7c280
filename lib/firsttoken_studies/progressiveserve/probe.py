"""One request by hand, alone in an executor: its tokens are given, its logits looked at, its transitions timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import GREEDY, Request
from firsttoken.progressiveserve.staged_serving.stage_versions import StagedModelVersion, moving
from firsttoken.progressiveserve.staged_serving.transitions import Transition


class Probe:
    """A request under ``view`` that has these ``blocks`` of ``executor``, which hold zeros as in a fresh pool."""

    def __init__(self, executor: LiveExecutor, view: StagedModelVersion, blocks: Sequence[int]) -> None:
        self._executor = executor
        self._blocks = list(blocks)
        executor.pool.rows[self._blocks] = 0
        self.view = view
        self._request: Request | None = None

    @property
    def ids(self) -> list[int]:
        """The tokens [tokens] whose keys and values are there."""
        return [] if self._request is None else self._request.tokens[: self._request.cached]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the hidden states that are kept for a transition."""
        return 0 if self.view.hidden_cache is None else self.view.hidden_cache.nbytes

    @torch.inference_mode()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Run ``ids`` [tokens] after what is there and return the logits [vocabulary] that follow the last one."""
        if self._request is None:
            self._request = Request(0, ids, GREEDY, 0.0)
            self._request.version = self.view
            self._request.blocks = self._blocks
        else:
            self._request.tokens.extend(ids)
        chunk = self._request.chunk()
        logits = self.view.decoder.logits(self._executor.plan(self.view, [chunk]))
        self._request.advance(chunk.end)
        return logits[0]

    def carry(self, view: StagedModelVersion, policy: Transition) -> None:
        """Move to ``view`` as ``policy`` says, computing again what it says in one step."""
        layers = moving(policy)(self.view, view)
        if layers is None:
            return
        request = self._request
        redo = self.view.redo(request, layers) if layers else None
        view.adopt(request)
        request.switch_to(view, redo)
        self.view = view
        if redo is not None:
            chunk = request.chunk()
            self._executor.execute([chunk])
            request.advance(chunk.end)
