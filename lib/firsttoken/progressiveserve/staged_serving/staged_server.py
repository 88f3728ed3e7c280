"""Serving from the first stage on, while the later ones arrive (ProgressiveServe, 3.4.2).

One thread imports what computes and brings the stages. The engine's thread runs the requests, all that are open in each
step; between two steps, and nowhere else, a stage that has arrived whole becomes the one that new requests begin with.
What happens to open ones is their policy's affair (``transitions.py``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from firsttoken.assets.model_config import CONFIG
from firsttoken.engine.model_server import LoadingServer
from firsttoken.engine.numpy_answers import NumpyAnswers
from firsttoken.engine.preemption.preemption_policy import MOVED, Recovery
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.engine.stream import step_failure
from firsttoken.engine.torch_behind import by_kernels
from firsttoken.lean.lean_config import OtherWay
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import Manifest, read_manifest
from firsttoken.progressiveserve.checkpoint.names import torch_dtype
from firsttoken.progressiveserve.loading.read_memory import BEFORE_TORCH, Memory, cpu_memory
from firsttoken.progressiveserve.loading.read_plan import adapter_blobs, open_reader, part_blobs, parts_of
from firsttoken.progressiveserve.loading.reader import BlobReader, ReadBefore
from firsttoken.study import dtypes
from firsttoken.study.errors import ClosedError, FirstTokenError, ModelError, files_alone
from firsttoken.study.system.cgroup_limits import free_memory_bytes

if TYPE_CHECKING:  # imported by the thread that loads, while requests are already taken
    import torch
    from torch import nn

    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken.engine.model_version import ModelVersion
    from firsttoken.engine.numpy_model import NumpyModel
    from firsttoken.progressiveserve.loading.loader import StageLoad
    from firsttoken.progressiveserve.loading.meta_model import MetaModel
    from firsttoken.progressiveserve.loading.stage_weights import StageWeights
    from firsttoken.progressiveserve.loading.views import StageView
    from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder
    from firsttoken.progressiveserve.staged_serving.stage_versions import Between, FusedBeside, StagedModelVersion
    from firsttoken.progressiveserve.staged_serving.transitions import Transition


class StageLoader:
    """Loads the stages of the checkpoint in ``folder`` over ``links`` by ``threads`` readers a link, one stage after
    another; ``dtype`` as in :func:`firsttoken.study.dtypes.serving`."""

    def __init__(self, folder: Path, links: Sequence[Link], *, device: str, dtype: str, threads: int) -> None:
        self.folder, self.links, self._device, self._dtype = folder, list(links), device, dtype
        self._threads = threads
        self._lock = threading.Lock()
        self._closed = False
        self._loading: StageLoad | None = None
        self._ahead: dict[int, tuple[BlobReader, Memory]] = {}  # by stage, begun before its turn
        self._reached = 0  # the stage whose load has begun
        self._builder: WeightBuilder | None = None  # of stage 1, begun before there is a model
        self.manifest: Manifest
        self.meta_model: MetaModel

    def read_ahead(self, stage: int, manifest: Manifest | None = None) -> None:
        """Begin to read ``stage`` before its turn, where that can be done without torch; what is wrong with it is for
        :meth:`plan`. The folder's ``manifest`` is read unless it is given."""
        if self._device != "cpu":  # the load wants pinned memory
            return
        with suppress(FirstTokenError):
            manifest = manifest or read_manifest(self.folder)
            merged = all(part.merged for part in parts_of(manifest, [stage]))
            memory = cpu_memory(merged, len(self.links), BEFORE_TORCH)
            options = {"threads": self._threads, "allocate": memory.allocate}
            with self._lock:
                if not self._closed and stage > self._reached:
                    reader = open_reader(self.folder, manifest, [stage], self.links, **options)
                    self._ahead[stage] = reader, memory

    def plan(self) -> tuple[int, int]:
        """The number of the stages, and of the bytes of all of them. Raises ModelError and StageError."""
        manifest = self.manifest = read_manifest(self.folder)
        stages = range(1, len(manifest.stages) + 1)
        every = [blobs(self.folder, manifest, [stage]) for stage in stages for blobs in (adapter_blobs, part_blobs)]
        return len(stages), sum(blob.bytes for blobs in every for blob in blobs)

    def build(self, read: ReadBefore | None = None) -> MetaModel:
        """The model before its weights, which are read meanwhile, or have been ``read`` for another one. Raises
        ModelError and StageError, or PermanentFault."""
        import torch

        from firsttoken.lean.build import build_lean
        from firsttoken.progressiveserve.loading.meta_model import MetaModel
        from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder

        manifest = self.manifest
        computing = dtypes.serving(self._dtype, torch_dtype(manifest.dtype), self._device)
        place = torch.device(self._device), computing
        with self._lock:
            if read is not None:
                self._builder = WeightBuilder(manifest, [1], read, *place, decoded=read.decoded)
            elif 1 in self._ahead:
                reader, memory = self._ahead.pop(1)
                self._builder = WeightBuilder(manifest, [1], reader, *place, memory)
        # a file that is not there yet may still be on its way, as a part of the model may; what a file says stays
        with files_alone() if (self.folder / CONFIG).is_file() else nullcontext():
            self.meta_model = MetaModel(self.folder, manifest, self._device, computing, build_lean)
        return self.meta_model

    def load(self, stage: int, previous: StageView) -> StageLoad:
        """Begin to load all that brings ``previous`` to ``stage``, at once."""
        from firsttoken.progressiveserve.loading.loader import StageLoad
        from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder

        stages, meta_model = range(previous.stage + 1, stage + 1), self.meta_model
        with self._lock:
            builder, self._builder = self._builder, None  # whose it is from now on
            self._reached = stage
            if builder is None and [*stages] == [stage] and stage in self._ahead:
                reader, memory = self._ahead.pop(stage)
                builder = WeightBuilder(self.manifest, stages, reader, meta_model.device, meta_model.dtype, memory)
        options = {"threads": self._threads, "builder": builder}
        load = StageLoad(self.folder, self.manifest, stages, self.links, meta_model, previous, **options)
        # ``close`` may have run while the load was being made, and found none that it could stop.
        with self._lock:
            self._loading, closed = load, self._closed
        if closed:
            load.close()
        return load

    def finish(self, load: StageLoad) -> StageView:
        """The view of what ``load`` brings, once it is whole. Raises what the load raises."""
        view = load.wait()
        self._loading = None  # the load holds its stage's layers
        return view

    def ended_by(self, error: Exception) -> bool:
        """Whether ``error`` is what ended the load that was under way."""
        return self._loading is not None and self._loading.failure is error

    def merging(self) -> dict[str, float]:
        """What it took to merge a stage into weights that were there: bytes of these, seconds in all and of the longest
        merge between two steps."""
        spent, self.meta_model.merges.spent = self.meta_model.merges.spent, []
        if not spent:
            return {}
        sizes, seconds = zip(*spent, strict=True)
        return {"merged_bytes": sum(sizes), "merging_s": sum(seconds), "longest_merge_s": max(seconds)}

    def close(self) -> None:
        """Stop the load that is under way, and begin no other."""
        with self._lock:
            self._closed = True
            loading, builder, ahead = self._loading, self._builder, [*self._ahead.values()]
        for reading in (loading, builder):
            if reading is not None:
                reading.close()
        for reader, memory in ahead:
            memory.close()
            reader.close()


class LastStageVariants(Protocol):
    """Variants of the whole model, which serve with its last stage."""

    def read(self, folder: Path, sha256: str, layers: Sequence[nn.Module]) -> None:
        """Read all that is theirs, for the ``layers`` of the model in ``folder``, whose weights have this ``sha256``
        ("" where nobody knows it) and may not be there yet. Raises StageError."""

    def host(self, version: StagedModelVersion, executor: LiveExecutor, between: Between) -> Mapping[str, ModelVersion]:
        """The variants by name, beside the ``version`` that is the last stage, each compared ``between`` two steps."""

    def fuse(self) -> Iterator[None]:
        """Fuse that version's layers, as it does alone, for the variants too."""


class StagedServer(LoadingServer):
    """Serves the staged checkpoint in ``folder``, fetched over ``links`` as :class:`StageLoader` does, while it
    arrives. ``policy`` says what becomes of requests when a better stage comes; ``recover`` False stays at the first
    stage, which is ``begin``, with those below it in one load. ``retry_s`` and ``broken`` are of all that load."""

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
        retry_s: float = 1.0,
        broken: Callable[[FirstTokenError], None] = lambda error: None,
        comes: Future[NumpyModel] | None = None,
    ) -> None:
        super().__init__(limits or RequestLimits(), device, retry_s, broken, comes)
        self._loader = StageLoader(folder, links, device=device, dtype=dtype, threads=threads)
        self._policy, self._recover, self._first = policy, recover, begin
        self._gates = ExitStack()  # at layers that have not arrived
        self._told = threading.Event()  # the status says what the clients are about to hear
        self._last: StagedModelVersion  # that was made; stage 1 makes the first
        self._fused: FusedBeside = {}
        self._reading: threading.Thread | None = None  # that begins with the second stage
        self.whole: Callable[[torch.dtype, str], str] | None = None
        """Called by the thread that loads, with dtype and sha256 of the weights, once the last stage serves; what it
        returns is an event."""
        self.variants: Callable[[], LastStageVariants] | None = None
        """Called by that thread too, for the variants that the last stage has."""
        self._late: LastStageVariants | None = None

    def close(self) -> None:
        with self._change:
            self._closing.set()
        self._loader.close()
        if (numpy := self._numpy) is not None:
            numpy.close()  # whose weights this server's threads may be waiting for
        super().close()
        if self._reading is not None:
            self._reading.join()

    @property
    def _bytes_moved(self) -> int:
        return sum(link.bytes_moved for link in self._loader.links)

    def _read_ahead(self, answers: NumpyAnswers | None) -> None:
        """Begin with the first stage, or with the second one as soon as that which answers is there."""

        def behind(answers: NumpyAnswers) -> None:
            if (model := answers.model) is not None:
                weights: StageWeights = model.weights
                weights.wait()
                if weights.fault is None and len(weights.manifest.stages) > 1:
                    self._loader.read_ahead(2, weights.manifest)

        if answers is None and self._first == 1:
            self._loader.read_ahead(1)
        elif answers is not None and self._recover:
            self._reading = threading.Thread(target=behind, args=(answers,), name="reading", daemon=True)
            self._reading.start()

    def _import(self) -> None:
        from firsttoken.progressiveserve.loading import loader  # noqa: F401
        from firsttoken.progressiveserve.staged_serving import stage_versions  # noqa: F401
        from firsttoken.progressiveserve.staged_serving.transitions import PrefillAgain

        self._policy = self._policy or PrefillAgain()

    def _begin(self) -> bool:
        """Load the first stage, with requests computing behind its layers as they arrive."""
        self._gates.close()  # of an attempt that failed
        self._stages, self._bytes_total = self._loader.plan()
        early = self._early_weights()
        meta_model = self._loader.build(early and early.read())
        if self.variants is not None:
            self._late = self.variants()
            with files_alone():
                self._late.read(self._loader.folder, self._loader.manifest.source_sha256 or "", meta_model.layers)
        load = self._loader.load(self._first, meta_model.empty_view())
        executor = self._live = self._executor(meta_model.model, meta_model.device)
        self._gates.enter_context(load.streaming())
        executor.version = self._last = self._view(load.view)
        if early is not None:
            self._loader.finish(load)  # it has nothing to read
            self._take_packed(early)
        self._end_numpy()
        self._told.clear()
        server = self._run(executor, self._explained, self._recovered)
        self._loader.finish(load)
        server.between(self._gates.close)  # the gates go while no step passes them
        self._compare(self._first)
        server.versions = self._hosted()
        meta_model.merges.between = server.between
        return True

    def _early_weights(self) -> StageWeights | None:
        """The weights that answer without torch, if any do, once they have come or cannot. Raises ModelError where
        other files have taken the place of theirs."""
        if self._numpy is None or (model := self._numpy.model) is None:
            return None
        weights: StageWeights = model.weights
        if self._closing.is_set():
            weights.close()  # it has come after the server was closed
        weights.wait()
        if isinstance(weights.fault, OtherWay):
            if type(weights.fault) is OtherWay:  # why there are no kernels, the engine tells
                print(f"firsttoken: {self._loader.folder.name} starts with torch: {weights.fault}", file=sys.stderr)
            self._numpy.close()
            self._numpy = None
            return None
        if weights.manifest.plan_sha256 != self._loader.manifest.plan_sha256:
            raise ModelError(f"{self._loader.folder} was staged anew while it was read; it is read again")
        return weights

    def _take_packed(self, early: StageWeights) -> None:
        """Let stage 1 compute with the weights that ``early`` has packed, where there is memory for both."""
        from firsttoken.engine.fused import FusedLayer
        from firsttoken.engine.native.library import kernels

        if early.packer.dtype == dtypes.name_of(dtype := self._loader.meta_model.dtype) and self._fits_twice():
            plain = self._last.modules.base
            fused = {i: (plain[i], FusedLayer(plain[i], panels)) for i, panels in early.panels.items()}
            self._last.take_fused(fused)
            if dtype not in kernels().multiplied:
                by_kernels(self._last, self._loader.meta_model.model, early)
            elif not self._merges:
                self._fused |= fused

    def _go_on(self) -> None:
        """Bring the other stages, and fuse the last one's layers."""
        last = self._stages if self._recover else self._first
        if last < self._stages:
            self._fuse_beside()
        if all(self._bring(stage) for stage in range(self._first + 1, last + 1)) and last == self._stages:
            if self.whole is not None and not self._closing.is_set():
                self._note(last, self.whole(self._loader.meta_model.dtype, self._loader.manifest.source_sha256 or ""))
            self._fused.clear()  # it holds plain layers, whose memory is given back one by one
            served = self._late or self._last
            self._fuse(served.fuse, self._loader.meta_model.release)  # once the last stage has taken over

    def _bring(self, stage: int) -> bool:
        """Whether ``stage`` came before the server was closed."""
        loader, previous = self._loader, self._last.modules

        def attempt() -> StageView:
            load = loader.load(stage, previous)
            self._fuse_beside()  # while bytes are on their way
            return loader.finish(load)

        view = self._insist(stage, attempt)
        if view is None:
            return False
        self._note(stage, "arrived", **loader.merging())
        self._last = self._view(view)
        self._last.take_fused(self._fused)
        self._compare(stage)
        self._server.soon(partial(self._switch_to, self._last, self._hosted()))
        return True

    def _compare(self, stage: int) -> None:
        with files_alone():
            self._last.compare(self._live, self._server.between, self._loader.folder, stage == self._stages)

    def _fuse_beside(self) -> None:
        """Fuse the layers that serve, where nothing will be merged into them, and there is memory for twice what they
        take."""
        if self._merges or not self._fits_twice():
            return
        for _ in self._last.fuse_beside(self._fused):
            if self._closing.is_set():
                return

    @property
    def _merges(self) -> bool:
        """Whether a later stage changes weights that are there."""
        return any(part.merged for stage in self._loader.manifest.stages for part in stage.parts)

    def _fits_twice(self) -> bool:
        """Whether there is memory for the weights once more."""
        free = free_memory_bytes()
        return free is None or free >= 2 * self._bytes_total

    def _view(self, modules: StageView) -> StagedModelVersion:
        from firsttoken.progressiveserve.staged_serving.stage_versions import StagedModelVersion

        return StagedModelVersion(self._loader.meta_model.model, modules, self._policy)

    def _hosted(self) -> Mapping[str, ModelVersion]:
        """The variants that serve with what was made last: none before the last stage."""
        late = None if self._last.stage < self._stages else self._late
        return {} if late is None else late.host(self._last, self._live, self._server.between)

    def _switch_to(self, view: StagedModelVersion, variants: Mapping[str, ModelVersion]) -> None:
        from firsttoken.progressiveserve.staged_serving.stage_versions import moving

        self._server.publish(view, moving(self._policy))
        self._server.versions = variants
        self._serving(view.stage)

    def _recovered(self, recovery: Recovery) -> None:
        if recovery.reason == MOVED:
            self._note(self._stage, f"a session of {recovery.tokens} tokens moved over", took_s=recovery.recompute_s)

    def _explained(self, error: Exception) -> Exception:
        """What clients are told when a step fails; when it was the load that did, once the status says so too."""
        if self._loader.ended_by(error):
            self._told.wait()
            return ClosedError("the server was closed") if self._closing.is_set() else error
        return step_failure(error)

    def _end_all(self, error: Exception) -> None:
        # This goes first: the engine's thread may be waiting for it in ``_explained``, and ``super`` joins that thread.
        self._told.set()
        super()._end_all(error)
        self._gates.close()  # not before: a step would compute with what is not there
