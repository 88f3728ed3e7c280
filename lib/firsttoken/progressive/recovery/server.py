"""Serving from the first stage on, while the later ones arrive (ProgressiveServe, 3.4.2).

One thread brings the stages. The engine's own thread runs the requests, all that are open in each step; between two
steps, and nowhere else, a stage that has arrived whole becomes the one that new requests begin with. What happens to
open ones is their policy's affair (``transitions.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from firsttoken.engine.engine import Engine
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.preemptor import MOVED, Recovery
from firsttoken.engine.request import Sampling
from firsttoken.engine.serving import Server, Standing, Stream, TokenSink
from firsttoken.link import Link
from firsttoken.progressive.loading.views import StageView
from firsttoken.progressive.recovery.growth import Growth
from firsttoken.progressive.recovery.limits import BLOCK_TOKENS, GrowthConfig
from firsttoken.progressive.recovery.transitions import PrefillAgain, Transition
from firsttoken.progressive.recovery.views import GrownView, moving
from firsttoken.study.errors import BusyError, FirstTokenError, RequestError

PAUSE_S = 0.05  # between two layers that are fused, which takes 10 ms each


class GrowingServer:
    """Serves the staged checkpoint in ``folder``, fetched over ``links``, while it arrives; ``dtype`` as in
    :func:`firsttoken.study.dtypes.serving`. Another ``growth`` serves another kind of folder."""

    def __init__(
        self,
        folder: Path,
        links: Sequence[Link],
        config: GrowthConfig | None = None,
        *,
        device: str = "cpu",
        dtype: str = "stored",
        policy: Transition | None = None,
        growth: type[Growth] = Growth,
    ) -> None:
        self.config = config = config or GrowthConfig()
        self._growth = growth(folder, links, device=device, dtype=dtype, threads=config.threads, retry_s=config.retry_s)
        self._policy = policy or PrefillAgain()
        self._change = threading.Condition()
        self._sessions: dict[Stream, tuple[Sequence[int], Sampling, bool]] = {}  # open, with what each asked for
        self._server: Server | None = None
        self._gates = ExitStack()  # at layers that have not arrived
        self._told = threading.Event()  # the status says what the clients are about to hear
        self._stage = 0
        self._last: GrownView  # that was made; stage 1 makes the first
        self._thread: threading.Thread | None = None

    # the client's side

    def start(self) -> None:
        """Begin to load and to serve; returns at once."""
        self._growth.note(0, "started")
        self._thread = threading.Thread(target=self._grow, name="growth", daemon=True)
        self._thread.start()

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
                raise BusyError("the server is shutting down")
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
            state = "degraded" if growth.error else "complete" if complete else "recovering" if stage else "loading"
            return {
                "stage": stage,
                "stages": growth.stages,
                "state": state,
                "error": growth.error or None,
                "events": list(growth.events),
                "sessions": len(self._sessions),
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

    def close(self) -> None:
        """End every session, the load that is under way, and both threads."""
        with self._change:
            self._growth.closing.set()
        self._growth.close()
        if self._thread is not None:
            self._thread.join()

    # what the streams call

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

    # the growing side

    def _grow(self) -> None:
        """Stage 1, with requests computing behind its layers as they arrive; then the others, one after another."""
        if (view := self._growth.insist(1, self._begin, self._end_all)) is not None:
            self._serving(view.stage)
            self._bring_the_others(view)
            del view  # so that its layers go one by one as they are fused
            if self._last.stage == self._growth.stages:
                self._fuse()
            self._growth.closing.wait()
        self._end_all(BusyError("the server was closed"))

    def _begin(self) -> StageView:
        """Load stage 1, and serve with what is there of it. Raises what the load raises."""
        load = self._growth.first()
        skeleton = self._growth.skeleton
        executor = LiveExecutor(
            skeleton.model,
            self.config.blocks,
            block_tokens=BLOCK_TOKENS,
            host_blocks=self.config.host_blocks,
            device=skeleton.device,
            touched=False,
        )
        self._gates.enter_context(load.streaming())
        executor.view = self._last = self._view(load.view)
        engine = Engine(executor, self.config.engine, policy=self.config.preemption, recovered=self._recovered)
        server = Server(engine, self.config.max_sessions, self._explained)
        self._told.clear()
        with self._change:
            self._server = server
            for session, asked in self._sessions.items():
                server.add(session, *asked)
        view = load.wait()
        server.between(self._gates.close)  # the gates go while no step passes them
        skeleton.planes.between = server.between
        return view

    def _bring_the_others(self, view: StageView) -> None:
        for better in self._growth.later(view) if self.config.recover else ():
            self._last = self._view(better)
            self._server.soon(partial(self._take_over, self._last))

    def _fuse(self) -> None:
        """The last stage's layers one after another, with pauses in which steps have all cores to themselves."""
        with suppress(FirstTokenError):  # the server is being closed
            self._server.between(self._growth.skeleton.release)  # once the last stage has taken over
            for _ in self._last.fuse():
                if self._growth.closing.wait(PAUSE_S):
                    return

    def _view(self, modules: StageView) -> GrownView:
        return GrownView(self._growth.skeleton.model, modules, self._policy)

    def _take_over(self, view: GrownView) -> None:
        self._server.publish(view, moving(self._policy))
        self._serving(view.stage)

    def _serving(self, stage: int) -> None:
        with self._change:
            self._stage = stage
            self._growth.note(stage, "serving")
            self._change.notify_all()

    def _recovered(self, recovery: Recovery) -> None:
        if recovery.reason == MOVED:
            what = f"a session of {recovery.tokens} tokens moved over"
            self._growth.note(self._stage, what, took_s=recovery.recompute_s)

    def _explained(self, error: Exception) -> Exception:
        """What clients are told when a step fails; when it was the load that did, once the status says so too."""
        if self._growth.ended_by(error):
            self._told.wait()
            return BusyError("the server was closed") if self._growth.closing.is_set() else error
        return error if isinstance(error, FirstTokenError) else RequestError(f"the engine failed: {error}")

    def _end_all(self, error: Exception) -> None:
        """Whoever is open ends with ``error``, in the engine or before it."""
        self._told.set()
        with self._change:
            server, self._server = self._server, None
            waiting = [session for session in self._sessions if session.request is None]
        if server is not None:
            server.close(error)
        self._gates.close()  # not before: a step would compute with what is not there
        for session in waiting if server is None else []:
            session.end(error)
