"""Serving from the first stage on, while the later ones arrive (ProgressiveServe, 3.4.2).

One thread imports what computes and brings the stages. The engine's thread runs the requests, all that are open in each
step; between two steps, and nowhere else, a stage that has arrived whole becomes the one that new requests begin with.
What happens to open ones is their policy's affair (``transitions.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.engine.model_server import LoadingServer
from firsttoken.engine.preemption.preemption_policy import MOVED, Recovery
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.engine.stream import step_failure
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.loading.stage_loader import StageLoader
from firsttoken.study.errors import ClosedError, permanent_faults

if TYPE_CHECKING:  # imported by the thread that loads, while requests are already taken
    from firsttoken.engine.model_version import ModelVersion
    from firsttoken.progressiveserve.loading.loader import StageLoad
    from firsttoken.progressiveserve.loading.meta_model import MetaModel
    from firsttoken.progressiveserve.loading.views import StageView
    from firsttoken.progressiveserve.staged_serving.stage_versions import FusedBeside, StagedModelVersion
    from firsttoken.progressiveserve.staged_serving.transitions import Transition


class StagedServer(LoadingServer):
    """Serves the staged checkpoint in ``folder``, fetched over ``links`` as :class:`StageLoader` does, while it
    arrives. ``policy`` says what becomes of requests when a better stage comes; ``recover`` False stays at the first
    stage, which is ``begin``, with those below it in one load."""

    def __init__(
        self,
        folder: Path,
        links: Sequence[Link],
        limits: RequestLimits | None = None,
        *,
        device: str = "cpu",
        dtype: str = "stored",
        policy: Transition | None = None,
        threads: int = 8,
        recover: bool = True,
        begin: int = 1,
    ) -> None:
        super().__init__(limits or RequestLimits(), device)
        self._loader = StageLoader(folder, links, device=device, dtype=dtype, threads=threads)
        self._policy, self._recover, self._first = policy, recover, begin
        self._gates = ExitStack()  # at layers that have not arrived
        self._status_written = threading.Event()  # the status says what the clients are about to hear
        self._last: StagedModelVersion  # that was made; stage 1 makes the first
        self._final: StagedModelVersion | None = None  # the last stage, whose layers arrive
        self._fused: FusedBeside = {}

    def close(self) -> None:
        with self._change:
            self._closing.set()
        self._loader.close()
        super().close()

    @property
    def _bytes_moved(self) -> int:
        return self._loader.bytes_moved

    def _read_ahead(self) -> None:
        if self._first == 1:
            self._loader.read_ahead(1)

    def _import(self) -> None:
        from firsttoken.progressiveserve.loading import loader  # noqa: F401
        from firsttoken.progressiveserve.staged_serving import stage_versions  # noqa: F401
        from firsttoken.progressiveserve.staged_serving.transitions import PrefillAgain

        self._policy = self._policy or PrefillAgain()

    def _begin(self) -> bool:
        load = self._load_first()
        self._status_written.clear()
        server = self._run(self._live, self._client_error, self._note_recovery, final=self._final)
        self._loader.finish(load)
        self._note_arrival(self._first, load)
        server.call(self._gates.close)  # the gates go while no step passes them
        self._compare(self._first)
        server.versions = self._variants()
        self._loader.meta_model.between = server.call
        return True

    def _load_first(self) -> StageLoad:
        """Begin to load the first stage; what runs it follows its layers, or waits at each until that is there."""
        self._gates.close()  # of an attempt that failed
        self._stages = self._loader.plan()
        self._bytes_total = self._loader.bytes_total
        meta_model = self._build()
        load = self._loader.load(self._first, meta_model.empty_view())
        self._live = self._executor(meta_model.model, meta_model.device)
        self._gates.enter_context(load.streaming())
        self._final = self._final_version(load.view)
        self._live.version = self._last = self._view(load.view)
        with self._change:
            tokens, engine = sum(len(prompt) for prompt, *_ in self._open.values()), self.limits.engine
        # One step at the gates is 30 ms sooner for a prompt of 64 tokens (SmolLM2-135M's shape, two cores), and lets
        # prompts share what one of them computes.
        if tokens > engine.token_budget and not engine.share_prefixes:
            self._last.arrival = partial(self._loader.arrived, self._first)
        return load

    def _final_version(self, first: StageView) -> StagedModelVersion | None:
        """The last stage, which prompts follow as it arrives; None where this is the ``first``, or has other weights in
        place of those that an earlier one has brought."""
        from firsttoken.progressiveserve.loading.views import make_view

        if not self._recover or first.stage == self._stages or not self._loader.shares_weights:
            return None
        version = self._view(make_view(self._stages, list(self._loader.meta_model.layers), first.ends))
        version.arrival = partial(self._loader.arrived, self._stages)
        return version

    def _build(self) -> MetaModel:
        return self._loader.build()

    def _continue_in_background(self) -> None:
        last = self._stages if self._recover else self._first
        if last < self._stages:
            self._fuse_beside()
        if all(self._load_stage(stage) for stage in range(self._first + 1, last + 1)) and last == self._stages:
            self._complete(self._last)

    def _load_stage(self, stage: int) -> bool:
        """Bring ``stage``, and return whether it came before the server was closed."""
        loader, previous = self._loader, self._last.modules

        def load() -> StageView:
            load = loader.load(stage, previous)
            self._fuse_beside()  # while bytes are on their way
            view = loader.finish(load)
            self._note_arrival(stage, load)
            return view

        view = self._attempt(stage, load)
        if view is None:
            return False
        if self._final is not None and stage == self._stages:
            self._last = self._final
            self._last.modules = view
            view.activate(self._loader.meta_model.model)
        else:
            self._last = self._view(view)
        self._last.use_fused(self._fused)
        self._compare(stage)
        self._server.call_soon(partial(self._switch_to, self._last, self._variants()))
        return True

    def _note_arrival(self, stage: int, load: StageLoad) -> None:
        self._note(stage, "arrived", at_s=load.arrived_s - self._started_s)

    def _complete(self, served: ModelVersion) -> None:
        """Fuse the layers of the last stage, which is ``served``, once it has taken over."""
        self._fused.clear()  # it holds plain layers, whose memory is given back one by one
        self._fuse(served.fuse, self._loader.meta_model.release)

    def _compare(self, stage: int) -> None:
        with permanent_faults():
            self._last.compare(self._live, self._server.call, self._loader.folder, stage == self._stages)

    def _fuse_beside(self) -> None:
        """Fuse the layers that serve, where no later stage refines them and there is memory for them twice."""
        if self._loader.refines or not self._loader.fits_twice:
            return
        for _ in self._last.fuse_beside(self._fused):
            if self._final is not None:
                self._final.use_fused(self._fused)
            if self._closing.is_set():
                return

    def _view(self, modules: StageView) -> StagedModelVersion:
        from firsttoken.progressiveserve.staged_serving.stage_versions import StagedModelVersion

        version = StagedModelVersion(self._loader.meta_model.model, modules, self._policy)
        version.whole = modules.stage == (self._stages if self._recover else self._first)
        return version

    def _variants(self) -> Mapping[str, ModelVersion]:
        """The variants, by name, that serve with what was made last: none."""
        return {}

    def _switch_to(self, view: StagedModelVersion, variants: Mapping[str, ModelVersion]) -> None:
        from firsttoken.progressiveserve.staged_serving.stage_versions import moving

        self._server.publish(view, moving(self._policy))
        self._server.versions = variants
        self._serving(view.stage)

    def _note_recovery(self, recovery: Recovery) -> None:
        if recovery.reason == MOVED:
            self._note(self._stage, f"a session of {recovery.tokens} tokens moved over", took_s=recovery.recompute_s)

    def _client_error(self, error: Exception) -> Exception:
        """Return what clients are told when a step fails; when it was the load that did, once the status says so
        too."""
        if self._loader.ended_by(error):
            self._status_written.wait()
            return ClosedError("the server was closed") if self._closing.is_set() else error
        return step_failure(error)

    def _end_all(self, error: Exception) -> None:
        # This goes first: the engine's thread may wait for it in ``_client_error``, and ``super`` joins that thread.
        self._status_written.set()
        super()._end_all(error)
        self._gates.close()  # not before: a step would compute with what is not there
