"""Around servers that only load: one that loads again what failed, and answers before torch is imported."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from firsttoken.engine.model_server import LoadingServer
from firsttoken.engine.stream import Stream, Submission
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken.study import dtypes
from firsttoken.study.errors import FirstTokenError, ModelError, NotLean, PermanentFault, first_line, permanent_faults

if TYPE_CHECKING:
    import numpy as np
    import torch

    from firsttoken.engine.async_engine import AsyncEngine
    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken.engine.model_version import ModelVersion
    from firsttoken.progressiveserve.loading.loader import StageLoad
    from firsttoken.progressiveserve.loading.meta_model import MetaModel
    from firsttoken_serve.variants import LateVariants

LONGEST_PAUSE_S = 60.0
T = TypeVar("T")


class EarlyWeights(Protocol):
    """The weights of a model that computes without torch, as threads read and pack them.

    Those of a staged checkpoint have its ``manifest`` and the ``panels`` of its layers, packed.
    """

    seen: str
    manifest: Any
    panels: Mapping[int, Mapping[str, np.ndarray]]

    @property
    def fault(self) -> BaseException | None:
        """Why some of them cannot come."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all weights are there or cannot come, or until ``timeout_s`` is over."""

    def read(self) -> Any:
        """Return what has been read of a staged checkpoint, once all has come. Raises what brings it."""

    def close(self) -> None:
        """Bring no more: who waits for a layer gets an error soon."""


class EarlyModel(Protocol):
    """A model of ``weights`` that computes in ``dtype`` without torch."""

    weights: EarlyWeights
    dtype: str


class EarlyAnswers(Protocol):
    """Answers requests until torch is imported."""

    @property
    def model(self) -> EarlyModel | None:
        """The model, once it has come; None where it cannot."""

    def begin(self) -> bool:
        """Answer from now on, and return when torch may be imported: True, but False where no model comes."""

    def end(self) -> None:
        """Generate no more tokens; a request in the middle of its answer goes back to those that wait."""

    def close(self) -> None:
        """End, and let nobody wait for weights that have not come."""


AnswerEarly = Callable[[threading.Condition, dict[Stream, Submission]], EarlyAnswers]
"""Makes the answers to the requests that wait, by stream; the condition guards them and is notified of each new one."""


class RetryingServer(LoadingServer):
    """Tries again what fails after ``retry_s`` seconds, and after twice as long each further time, up to a minute; each
    failure is a line on the terminal. ``broken`` is told, by the thread that loads, of what leaves no hope: something
    that computes cannot be imported, or the files are of no model that can be served. ``early`` makes what answers
    until there is an engine.
    """

    def __init__(
        self,
        *options: Any,
        retry_s: float = 1.0,
        broken: Callable[[FirstTokenError], None] = lambda error: None,
        early: AnswerEarly | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*options, **named)
        self._retry_s, self._broken = retry_s, broken
        self._early = None if early is None else early(self._change, self._open)

    def _answers_early(self) -> bool:
        """Return whether requests are answered without torch from now on, which may be imported when this returns."""
        return self._early is not None and self._early.begin()

    def _attempt(self, stage: int, load: Callable[[], T]) -> T | None:
        """Return what ``load`` brings, called until it raises nothing. Raises PermanentFault.

        Any kind of exception is caught: a thread that dies would leave its clients waiting for ever.
        """
        pause = self._retry_s
        while not self._closing.is_set():
            try:
                loaded = super()._attempt(stage, load)
                self._error = ""
                return loaded
            except Exception as error:
                self._error = f"stage {stage}: {first_line(error)}"
                self._note(stage, f"failed: {first_line(error)}")
                if isinstance(error, PermanentFault):
                    raise
                print(f"firsttoken: {self._error}; it is tried again in {pause:g} s", file=sys.stderr, flush=True)
                if not self._stage:  # nobody can be served meanwhile
                    self._end_all(error)
                self._closing.wait(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)
        return None

    def _run(self, executor: LiveExecutor, *options: Any, **named: Any) -> AsyncEngine:
        """End answers without torch. Their model is freed once the engine has copied its keys and values."""
        if self._early is not None:
            self._early.end()
            self._early = None
        return super()._run(executor, *options, **named)

    def _give_up(self, fault: FirstTokenError) -> None:
        super()._give_up(fault)
        self._broken(fault)

    def _end_all(self, error: Exception) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None
        super()._end_all(error)


class StagedService(RetryingServer, StagedServer):
    """Serves a staged checkpoint, its last stage with ``variants`` by the folders of their adapters, and goes on with
    what the weights of a first stage have begun without torch."""

    def __init__(self, *options: Any, variants: Mapping[str, Path] = MappingProxyType({}), **named: Any) -> None:
        super().__init__(*options, **named)
        self._reading: threading.Thread | None = None  # that begins with the second stage
        self._packed: EarlyWeights | None = None  # of the first stage, which have come
        self.whole: Callable[[torch.dtype, str], str] | None = None
        """Called by the thread that loads, with dtype and sha256 of the weights, once the last stage serves; what it
        returns is an event."""
        self._variant_folders = variants
        self._late_variants: LateVariants | None = None

    def close(self) -> None:
        with self._change:
            self._closing.set()
        if (early := self._early) is not None:
            early.close()  # whose weights this server's threads may be waiting for
        super().close()
        if self._reading is not None:
            self._reading.join()

    def _read_ahead(self) -> None:
        """Begin with the first stage, or with the second one as soon as that which answers is there."""
        if not self._answers_early():
            super()._read_ahead()
        elif self._recover:
            self._reading = threading.Thread(target=self._read_behind, args=(self._early,), name="reading", daemon=True)
            self._reading.start()

    def _read_behind(self, answers: EarlyAnswers) -> None:
        if (model := answers.model) is not None:
            weights = model.weights
            weights.wait()
            if weights.fault is None and len(weights.manifest.stages) > 1:
                self._loader.read_ahead(2, weights.manifest)

    def _build(self) -> MetaModel:
        self._packed = self._early_weights()
        manifest = self._loader.manifest
        meta_model = self._loader.build(self._packed and partial(self._packed.read().builder, manifest, [1]))
        if self._variant_folders:
            from firsttoken_serve.variants import LateVariants

            self._late_variants = LateVariants(self._variant_folders, self._device)
            with permanent_faults():
                self._late_variants.read(self._loader.folder, manifest.source_sha256 or "", meta_model.layers)
        return meta_model

    def _early_weights(self) -> EarlyWeights | None:
        """The weights that answer without torch, if any do, once they have come or cannot. Raises ModelError where
        other files have taken the place of theirs."""
        if self._early is None or (model := self._early.model) is None:
            return None
        weights = model.weights
        if self._closing.is_set():
            weights.close()  # it has come after the server was closed
        weights.wait()
        if isinstance(weights.fault, NotLean):
            if type(weights.fault) is NotLean:  # why there are no kernels, the engine tells
                print(f"firsttoken: {self._loader.folder.name} starts with torch: {weights.fault}", file=sys.stderr)
            self._early.close()
            self._early = None
            return None
        if weights.manifest.plan_sha256 != self._loader.manifest.plan_sha256:
            raise ModelError(f"{self._loader.folder} was staged anew while it was read; it is read again")
        return weights

    def _load_first(self) -> StageLoad:
        load = super()._load_first()
        if (packed := self._packed) is not None:
            self._packed = None
            self._loader.finish(load)  # it has nothing to read
            self._take_packed(packed, self._early.model.dtype)
        return load

    def _take_packed(self, packed: EarlyWeights, computed: str) -> None:
        """Let stage 1 compute with the weights that were ``packed``, in the dtype ``computed``, where there is memory
        for both."""
        from firsttoken.engine.accelerator import accelerator

        dtype, backend = self._loader.meta_model.dtype, accelerator()
        if computed == dtypes.name_of(dtype) and self._loader.fits_twice:
            plain = self._last.modules.base
            fused = {i: (plain[i], backend.fuse_layer(plain[i], panels)) for i, panels in packed.panels.items()}
            self._last.use_fused(fused)
            if not backend.multiplies(dtype):
                head, self._last.attend = backend.continuation(self._loader.meta_model.model.lm_head, packed)
                self._last.decoder.set_head(head)
            elif not self._loader.refines:
                self._fused |= fused

    def _complete(self, served: ModelVersion) -> None:
        if self.whole is not None and not self._closing.is_set():
            loader = self._loader
            self._note(self._stages, self.whole(loader.meta_model.dtype, loader.manifest.source_sha256 or ""))
        super()._complete(self._late_variants or served)

    def _variants(self) -> Mapping[str, ModelVersion]:
        """The variants that serve with what was made last: none before the last stage."""
        if self._late_variants is None or self._last.stage < self._stages:
            return {}
        return self._late_variants.host(self._last, self._live, self._server.call)
