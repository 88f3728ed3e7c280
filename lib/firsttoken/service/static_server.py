"""A service's model that is there from the beginning, wherever it computes; GrowingServer is the one that is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from firsttoken.engine.async_engine import Server, Standing, Stream, TokenSink
from firsttoken.engine.engine import Engine
from firsttoken.engine.request import Sampling
from firsttoken.progressiveserve.staged_serving.request_limits import GrowthConfig
from firsttoken.study.errors import ClosedError


class ReadyServer:
    """Serves what ``engine`` runs within ``limits``, as a GrowingServer of one stage would; ``ended`` is called when it
    is closed."""

    def __init__(self, engine: Engine, limits: GrowthConfig, ended: Callable[[], None]) -> None:
        self.config = limits
        self._ended = ended
        self._open: set[Stream] = set()
        self._change = threading.Lock()
        self._closed = False
        self._server = Server(engine, limits.max_sessions)

    def start(self) -> None:
        """Do nothing, as everything is there from the beginning; a GrowingServer begins to load here."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        upgrade: bool = False,
        events: TokenSink | None = None,
    ) -> Stream:
        """Submit a prompt and return its stream, as a GrowingServer does; there is nothing to ``upgrade`` to."""
        self.config.check(len(prompt_ids), sampling.max_tokens)
        with self._change:
            if self._closed:
                raise ClosedError("the server is shutting down")
            self.config.check_room(len(self._open))
            stream = Stream(self._server.leave, self._forget, events)
            self._open.add(stream)
        self._server.add(stream, prompt_ids, sampling, False)
        return stream

    def standing(self) -> Standing:
        """What the engine holds now."""
        return self._server.standing()

    def close(self) -> None:
        """End every session, here and wherever the model is."""
        with self._change:
            closed, self._closed = self._closed, True
        if not closed:
            self._server.close(ClosedError("the server was closed"))
            self._ended()

    def _forget(self, stream: Stream) -> None:
        with self._change:
            self._open.discard(stream)
