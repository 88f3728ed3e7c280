"""The clients' side of a server that grows: requests are taken from the first moment on, before torch is imported."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from firsttoken.engine.request import Sampling
from firsttoken.engine.serving import Server, Standing
from firsttoken.engine.streams import Stream, TokenSink
from firsttoken.progressiveserve.recovery.growth import Growth
from firsttoken.progressiveserve.recovery.limits import GrowthConfig
from firsttoken.study.errors import ClosedError, FirstTokenError


class Reception:
    """Keeps who comes until there is an engine, then sends them on to it; ``growth`` is what has come of the model."""

    def __init__(self, growth: Growth, config: GrowthConfig) -> None:
        self.config = config
        self._growth = growth
        self._change = threading.Condition()
        self._sessions: dict[Stream, tuple[Sequence[int], Sampling, bool]] = {}  # open, with what each asked for
        self._server: Server | None = None
        self._stage = 0  # that new requests begin with
        self._restored = 0  # requests that began with a stored prefix
        self._hopeless: FirstTokenError | None = None

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | int,
        upgrade: bool = False,
        events: TokenSink | None = None,
    ) -> Stream:
        """Open a generation; a number is as many greedy tokens. ``upgrade`` moves it to a better stage when one comes,
        else it ends as it began.

        Its tokens go to ``events`` if given, else the stream has them. Returns at once.
        Raises RequestError for a prompt or a length outside the limits and BusyError when all places are taken; what
        the model cannot take, and what goes wrong later, the stream raises.
        """
        self.config.check(len(prompt_ids), sampling.max_tokens if isinstance(sampling, Sampling) else sampling)
        asked = prompt_ids, sampling if isinstance(sampling, Sampling) else Sampling(sampling), upgrade
        with self._change:
            if self._growth.closing.is_set():
                raise self._hopeless or ClosedError("the server is shutting down")
            self.config.check_room(len(self._sessions))
            session = Stream(self._leave, self._forget, events)
            self._sessions[session] = asked
            if self._server is not None:
                self._server.add(session, *asked)
        return session

    def status(self) -> dict[str, Any]:
        """Stage, state and what happened so far; times in seconds since the start."""
        growth = self._growth
        with self._change:
            stage = self._stage
            complete = bool(stage) and (stage == growth.stages or not self.config.recover)
            before = "loading" if growth.prepared else "starting"
            running = "complete" if complete else "recovering" if stage else before
            state = "failed" if self._hopeless else "degraded" if growth.error else running
            return {
                "stage": stage,
                "stages": growth.stages,
                "state": state,
                "error": growth.error or None,
                "events": list(growth.events),
                "sessions": len(self._sessions),
                "restored": self._restored,
                "bytes_loaded": growth.bytes_moved,
                "bytes_total": growth.bytes_total,
            }

    def standing(self) -> Standing:
        """What the engine holds now; what waits for stage 1 waits there."""
        with self._change:
            server, waiting = self._server, len(self._sessions)
        return Standing(waiting=waiting) if server is None else server.standing()

    def wait_stage(self, stage: int, timeout_s: float) -> bool:
        """Wait until requests are served by ``stage`` or a later one; False when ``timeout_s`` is over first."""
        with self._change:
            return self._change.wait_for(lambda: self._stage >= stage, timeout_s)

    def _leave(self, session: Stream, wait: bool) -> None:
        with self._change:
            server = self._server
        if server is not None:
            server.leave(session, wait)
        else:
            session.end()

    def _forget(self, session: Stream) -> None:
        with self._change:
            self._sessions.pop(session, None)
