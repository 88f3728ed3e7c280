"""The service over a swarm: ends and engine are here, the model's blocks on whoever serves them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from firsttoken.engine.request import Sampling
from firsttoken.engine.serving import Server, Standing, Stream, TokenSink
from firsttoken.progressive.recovery.limits import GrowthConfig
from firsttoken.service.config import ServiceConfig
from firsttoken.study import dtypes
from firsttoken.study.errors import BusyError, FirstTokenError, RequestError
from firsttoken.swarm.access import Access, check_installed
from firsttoken.swarm.background import wait_for
from firsttoken.swarm.patience import Patience
from firsttoken.swarm.remote import RemoteModel

_TOLD = 50  # servers that were replaced lately


class SwarmServer:
    """Serves the model of ``config`` by its swarm, as a GrowingServer of one stage would.

    Raises SwarmError when nobody answers at the addresses given, or a block is served by nobody; ModelError for a
    folder without the model's ends.
    """

    def __init__(self, config: ServiceConfig, limits: GrowthConfig) -> None:
        check_installed()
        self.config = limits
        self._model = RemoteModel(
            config.folder,
            config.swarm,
            dtype=dtypes.resolve(dtypes.AUTO, "cpu"),
            patience=Patience(step_s=config.swarm_step_s),
            access=Access.read(config.swarm_token_file, config.swarm_tls_ca, None, None),
            tokens=limits.blocks * 16,
            config=limits.engine,
        )
        try:
            wait_for(self._model.swarm.check(self._model.chain.layers))
        except FirstTokenError:
            self._model.close()
            raise
        self._model.executor.view.stage = 1
        self._bytes = sum(weight.nbytes for weight in self._model.model.parameters() if not weight.is_meta)
        self._open: set[Stream] = set()
        self._change = threading.Lock()
        self._closed = False
        self._server = Server(self._model.engine, limits.max_sessions, _explained)

    def start(self) -> None:
        """As of a GrowingServer; here everything is there from the beginning."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        upgrade: bool = False,
        events: TokenSink | None = None,
    ) -> Stream:
        """As of a GrowingServer; there is nothing to ``upgrade`` to."""
        self.config.check(len(prompt_ids), sampling.max_tokens)
        with self._change:
            if self._closed:
                raise BusyError("the server is shutting down")
            self.config.check_room(len(self._open))
            stream = Stream(self._server.leave, self._forget, events)
            self._open.add(stream)
        self._server.add(stream, prompt_ids, sampling, False)
        return stream

    def status(self) -> dict[str, Any]:
        """One stage that is there; the ``servers`` of the chain, in order, and as ``events`` who was replaced."""
        model = self._model
        servers = [
            {"blocks": [line.layers.start, line.layers.stop], "address": record.address, "key": record.server[:8]}
            for line, record in list(model.chain.lines)
        ]
        return {
            "stage": 1,
            "stages": 1,
            "state": "complete",
            "error": None,
            "events": [{"stage": 1, "what": f"replaced {key[:8]}: {why}"} for key, why in model.chain.faults[-_TOLD:]],
            "sessions": len(self._open),
            "bytes_loaded": self._bytes,
            "bytes_total": self._bytes,
            "servers": servers,
            "known": len(model.swarm.servers()),
        }

    def standing(self) -> Standing:
        """What the engine holds now."""
        return self._server.standing()

    def close(self) -> None:
        """End every session, here and on the servers."""
        with self._change:
            closed, self._closed = self._closed, True
        if not closed:
            self._server.close(BusyError("the server was closed"))
            self._model.close()

    def _forget(self, stream: Stream) -> None:
        with self._change:
            self._open.discard(stream)


def _explained(error: Exception) -> Exception:
    """What clients are told when a step fails: who serves a block may come back."""
    return error if isinstance(error, FirstTokenError) else RequestError(f"the engine failed: {error}")
