"""One thread that serves from the first stage on, and another that brings the later stages (ProgressiveServe, 3.4.2).

Sessions take turns, a token each. Between two turns, and nowhere else, a stage that has arrived whole becomes the
one that new requests begin with; what happens to open ones is their policy's affair (``transitions.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.link import Link
from firsttoken.progressive.loading.views import StageView
from firsttoken.progressive.recovery.contexts import Context
from firsttoken.progressive.recovery.growth import Growth
from firsttoken.progressive.recovery.sessions import Session
from firsttoken.progressive.recovery.transitions import PrefillAgain, Transition
from firsttoken.study.errors import BusyError, RequestError


@dataclass(frozen=True)
class EngineConfig:
    """Limits and habits of an engine.

    ``threads`` readers a link; ``verify`` sha256 sums as files arrive; a failed stage is tried again after ``retry_s``
    seconds, and after twice as long each further time, up to a minute. ``recover`` False stays at stage 1.
    """

    threads: int = 8
    verify: bool = True
    recover: bool = True
    retry_s: float = 1.0
    max_sessions: int = 8
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 1024


class Engine:
    """Serves the staged checkpoint in ``folder``, fetched over ``links``, while it arrives; ``dtype`` as in
    :func:`firsttoken.study.dtypes.serving`."""

    def __init__(
        self,
        folder: Path,
        links: Sequence[Link],
        config: EngineConfig | None = None,
        *,
        device: str = "cpu",
        dtype: str = "stored",
        upgrade_policy: Transition | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self._growth = Growth(
            folder,
            links,
            device=device,
            dtype=dtype,
            threads=config.threads,
            verify=config.verify,
            retry_s=config.retry_s,
        )
        self._policy = upgrade_policy or PrefillAgain()
        self._work = threading.Condition()
        self._sessions: list[Session] = []
        self._view: StageView | None = None  # what new requests begin with
        self._arrived: StageView | None = None  # takes over at the next token boundary
        self._threads: list[threading.Thread] = []

    # the client's side

    def start(self) -> None:
        """Begin to load and to serve; returns at once."""
        self._growth.note(0, "started")
        self._spawn(self._serve, "engine")

    def submit(
        self, prompt_ids: Sequence[int], max_new_tokens: int, upgrade: bool = False, stop_ids: Sequence[int] = ()
    ) -> Session:
        """Open a greedy generation. ``upgrade`` moves it to a better stage when one arrives; else it ends as it began.

        Raises RequestError for a prompt or a length outside the limits and BusyError when all places are taken.
        """
        limits = self.config
        if not 1 <= len(prompt_ids) <= limits.max_prompt_tokens:
            raise RequestError(f"the prompt has {len(prompt_ids)} tokens; 1 to {limits.max_prompt_tokens} are taken")
        if not 1 <= max_new_tokens <= limits.max_new_tokens:
            raise RequestError(f"max_tokens is {max_new_tokens}; 1 to {limits.max_new_tokens} can be asked for")
        session = Session(prompt_ids, max_new_tokens, upgrade, stop_ids)
        with self._work:
            if self._growth.closing.is_set():
                raise BusyError("the server is shutting down")
            if len(self._sessions) >= limits.max_sessions:
                raise BusyError(
                    f"{limits.max_sessions} requests are open, which is all that is served; try again later"
                )
            self._sessions.append(session)
            self._work.notify_all()
        return session

    def status(self) -> dict[str, Any]:
        """Stage, state and what happened so far; times in seconds since the start."""
        growth = self._growth
        with self._work:
            stage = self._view.stage if self._view else 0
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

    def wait_stage(self, stage: int, timeout_s: float) -> bool:
        """Wait until requests are served by ``stage`` or a later one; False when ``timeout_s`` is over first."""
        with self._work:
            return self._work.wait_for(lambda: bool(self._view and self._view.stage >= stage), timeout_s)

    def close(self) -> None:
        """End every session, the load that is under way, and both threads."""
        self._growth.close()
        with self._work:
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    # the engine's side

    def _spawn(self, target: Any, name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """Stage 1, with requests computing behind its layers as they arrive; then turn after turn."""
        if view := self._growth.insist(1, self._begin, self._end_all):
            self._publish(view)
            if self.config.recover:
                self._spawn(self._recover, "recovery")
        while not self._growth.closing.is_set():
            self._turn(None)
        self._end_all(BusyError("the server was closed"))

    def _begin(self) -> StageView:
        load = self._growth.first()
        with load.streaming():
            while not load.arrived and not self._growth.closing.is_set():
                self._turn(load.view)
        return load.wait()

    def _recover(self) -> None:
        for view in self._growth.later(self._view):
            with self._work:
                self._arrived = view
                self._work.notify_all()

    def _publish(self, view: StageView) -> None:
        """Between two tokens: new requests begin with ``view``, and open ones that asked for it move over."""
        for session in list(self._sessions):
            if session.upgrade and not session.cancelled and session.context:
                self._move(session, session.context, view)
        with self._work:
            self._view = view
            self._growth.note(view.stage, "serving")
            self._work.notify_all()

    def _move(self, session: Session, context: Context, view: StageView) -> None:
        if context.view is view:
            return
        start = time.monotonic()
        try:
            self._policy.carry(context, view)
        except Exception as error:  # as in _step: that client's answer
            self._drop(session, error)
            return
        what = f"a session of {len(context.ids)} tokens moved over"
        self._growth.note(view.stage, what, took_s=time.monotonic() - start)

    def _turn(self, loading: StageView | None) -> None:
        """A token for each open session; with none open, wait for one."""
        with self._work:
            arrived, self._arrived = self._arrived, None
            sessions = list(self._sessions)
            if not sessions and not arrived:
                self._work.wait(0.01 if loading else 0.2)
        if arrived:
            self._publish(arrived)
        for session in sessions:
            self._step(session, loading or self._view)

    def _step(self, session: Session, view: StageView) -> None:
        try:
            if session.cancelled:
                more = False
            else:
                if session.context is None:
                    session.context = self._open(session, view)
                logits = session.context.feed(session.next_ids)
                more = session.emit(int(logits.argmax()), session.context.view.stage)
        except Exception as error:  # one request's failure is that client's answer, not the end of the service
            if not self._growth.ended_by(error):  # else all are told, once the status says it too (``_end_all``)
                self._drop(session, error)
            return
        if not more:
            self._drop(session)

    def _open(self, session: Session, view: StageView) -> Context:
        """Raises RequestError for what this model cannot take; the server's own limits were checked before."""
        model = self._growth.skeleton.model
        odd = next((i for i in session.prompt_ids if not 0 <= i < model.config.vocab_size), None)
        if odd is not None:
            raise RequestError(f"token {odd} is not in the vocabulary of {model.config.vocab_size}")
        longest, asked = model.config.max_position_embeddings, len(session.prompt_ids) + session.max_new_tokens
        if asked > longest:
            raise RequestError(f"prompt and answer are {asked} tokens; the model's context has {longest}")
        return Context(model, view, self._policy.keep(view))

    def _drop(self, session: Session, error: Exception | None = None) -> None:
        with self._work:
            if session in self._sessions:
                self._sessions.remove(session)
        session.end(BusyError("the server was closed") if error and self._growth.closing.is_set() else error)

    def _end_all(self, error: Exception) -> None:
        with self._work:  # a client that found the engine open has its session in the list by now
            sessions = list(self._sessions)
        for session in sessions:
            self._drop(session, error)
