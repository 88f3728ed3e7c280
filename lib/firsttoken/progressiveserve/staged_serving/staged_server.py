"""Serving from the first stage on, while the later ones arrive (ProgressiveServe, 3.4.2).

Requests are taken at once. One thread imports what computes and brings the stages; every import of
torch is its own, so that no two threads wait for each other's. The engine's thread runs the requests, all that are open
in each step; between two steps, and nowhere else, a stage that has arrived whole becomes the one that new requests
begin with. What happens to open ones is their policy's affair (``transitions.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.assets.lock import first_line
from firsttoken.engine.async_engine import Server, Standing, Stream, TokenSink, step_failure
from firsttoken.engine.preemptor import MOVED, Recovery
from firsttoken.engine.request import Sampling
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.staged_serving.request_limits import BLOCK_TOKENS, GrowthConfig
from firsttoken.progressiveserve.staged_serving.stage_loader import Growth, NoHope, files_alone
from firsttoken.study.errors import ClosedError, FirstTokenError, StageError
from firsttoken.study.system.openmp import loops_on_one_core

# The clients' side of a server that grows: requests are taken from the first moment on, before torch is imported.


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


if TYPE_CHECKING:  # imported by the thread that grows, while requests are already taken
    import torch

    from firsttoken.engine.request import PrefixSource
    from firsttoken.progressiveserve.loading.views import StageView
    from firsttoken.progressiveserve.staged_serving.stage_versions import GrownView
    from firsttoken.progressiveserve.staged_serving.transitions import Transition

    Prefixes = Callable[[torch.dtype], Callable[[Sequence[int]], PrefixSource | None]]

PAUSE_S = 0.05  # between two layers that are fused, which takes 10 ms each


class GrowingServer(Reception):
    """Serves the staged checkpoint in ``folder``, fetched over ``links``, while it arrives; ``dtype`` as in
    :func:`firsttoken.study.dtypes.serving`. Another ``growth`` serves another kind of folder. ``broken`` is told, by
    another thread, of what leaves no hope: something that computes cannot be imported, or the files are of no model
    that can be served.
    ``prefixes`` is asked once, when the only stage is there, and then for what is stored of each prompt."""

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
        broken: Callable[[FirstTokenError], None] = lambda error: None,
        prefixes: Prefixes | None = None,
    ) -> None:
        config = config or GrowthConfig()
        options = {"device": device, "dtype": dtype, "threads": config.threads, "retry_s": config.retry_s}
        super().__init__(growth(folder, links, **options), config)
        self._policy, self._broken, self._prefixes = policy, broken, prefixes
        self._gates = ExitStack()  # at layers that have not arrived
        self._told = threading.Event()  # the status says what the clients are about to hear
        self._last: GrownView  # that was made; stage 1 makes the first
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to load and to serve; returns at once."""
        self._growth.note(0, "started")
        self._thread = threading.Thread(target=self._grow, name="growth", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every session, the load that is under way, and both threads."""
        with self._change:
            self._growth.closing.set()
        self._growth.close()
        if self._thread is not None:
            self._thread.join()

    def _grow(self) -> None:
        """Stage 1, with requests computing behind its layers as they arrive; then the others, one after another."""
        if not self._prepare():
            return
        try:
            view = self._growth.insist(1, self._begin, self._end_all)
        except NoHope as error:
            self._give_up(error.fault)
            return
        if view is not None:
            self._serving(view.stage)
            self._open_prefixes()
            self._bring_the_others(view)
            del view  # so that its layers go one by one as they are fused
            if self._last.stage == self._growth.stages:
                self._fuse()
            self._growth.closing.wait()
        self._end_all(ClosedError("the server was closed"))

    def _prepare(self) -> bool:
        """Import what computes. Where that fails it would every time: nobody is served, and whoever asks learns why."""
        try:
            self._growth.prepare()
            from firsttoken.progressiveserve.staged_serving.transitions import PrefillAgain

            self._policy = self._policy or PrefillAgain()
            return True
        except FirstTokenError as error:
            self._give_up(error)
        except Exception as error:
            fault = f"what computes cannot be imported: {first_line(error)}"
            self._give_up(StageError(f"{fault}; install firsttoken again"))
        return False

    def _give_up(self, fault: FirstTokenError) -> None:
        """Nobody is served from now on: who waits, and who asks, learns of ``fault``."""
        self._growth.error = str(fault)
        with self._change:
            self._hopeless = fault
            self._growth.closing.set()
        self._end_all(fault)
        self._broken(fault)

    def _begin(self) -> StageView:
        """Load stage 1, and serve with what is there of it. Raises what the load raises."""
        from firsttoken.engine.engine import Engine
        from firsttoken.engine.live_executor import LiveExecutor

        self._gates.close()  # of an attempt that failed
        load = self._growth.first()
        skeleton = self._growth.skeleton
        with files_alone():
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
        loops_on_one_core()  # layers are fused in this thread while others are computed with
        self._told.clear()
        with self._change:
            self._server = server
            for session, asked in self._sessions.items():
                server.add(session, *asked)
        view = load.wait()
        server.between(self._gates.close)  # the gates go while no step passes them
        skeleton.merges.between = server.between
        return view

    def _open_prefixes(self) -> None:
        if self._prefixes is None:
            return
        try:
            find = self._prefixes(next(self._growth.skeleton.model.parameters()).dtype)
        except FirstTokenError as error:
            self._growth.note(self._stage, f"no stored prefixes: {first_line(error)}")
            return

        def counted(prompt: Sequence[int]) -> PrefixSource | None:
            source = find(prompt)
            self._restored += source is not None
            return source

        self._server.sources = counted
        self._growth.note(self._stage, "stored prefixes are used")

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
        from firsttoken.progressiveserve.staged_serving.stage_versions import GrownView

        return GrownView(self._growth.skeleton.model, modules, self._policy)

    def _take_over(self, view: GrownView) -> None:
        from firsttoken.progressiveserve.staged_serving.stage_versions import moving

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
            return ClosedError("the server was closed") if self._growth.closing.is_set() else error
        return step_failure(error)

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
