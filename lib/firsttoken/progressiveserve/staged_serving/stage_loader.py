"""Bringing the stages of one checkpoint one after another, each until it is there (ProgressiveServe, 3.4.2).

Whoever imports this has imported no torch yet: :meth:`Growth.prepare` does, while the first bytes come.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.assets.lock import first_line
from firsttoken.assets.model_config import CONFIG
from firsttoken.lean.importing import uncollected
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import Manifest, read_manifest
from firsttoken.progressiveserve.loading.read_plan import adapter_blobs, open_reader, part_blobs
from firsttoken.progressiveserve.loading.reader import BlobReader
from firsttoken.study import dtypes
from firsttoken.study.devices import check_device
from firsttoken.study.errors import FirstTokenError

if TYPE_CHECKING:
    from firsttoken.progressiveserve.loading.loader import StageLoad
    from firsttoken.progressiveserve.loading.views import StageView
    from firsttoken.progressiveserve.loading.weight_builder import Maker


LONGEST_PAUSE_S = 60.0


class NoHope(Exception):
    """Why a load fails each time: ``fault`` follows from files that do not change by themselves."""

    def __init__(self, fault: FirstTokenError) -> None:
        super().__init__(str(fault))
        self.fault = fault


@contextmanager
def files_alone() -> Iterator[None]:
    """Inside the block nothing is brought: what a user could mend there does not pass. Raises NoHope."""
    try:
        yield
    except FirstTokenError as error:
        raise NoHope(error) from error


class Growth:
    """What has arrived of a checkpoint and what went wrong on the way.

    Written by the thread that brings it, and its ``events`` by the engine's too.
    A stage that fails is tried again after ``retry_s`` seconds, and after twice as long each further time; each failure
    is a line on the terminal. What follows from the files alone is not tried again.
    """

    def __init__(
        self,
        folder: Path,
        links: Sequence[Link],
        *,
        device: str,
        dtype: str,
        threads: int,
        retry_s: float,
    ) -> None:
        self.stages, self.bytes_total, self.error = 0, 0, ""
        self.prepared = False
        self.events: list[dict[str, Any]] = []
        self.closing = threading.Event()
        self._folder, self._links, self._device, self._dtype = folder, list(links), device, dtype
        self._threads = threads
        self._retry_s = retry_s
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._loading: StageLoad | None = None
        self._early: BlobReader | Maker | None = None  # of stage 1, begun before there is a model

    def note(self, stage: int, what: str, **more: float) -> None:
        """Remember that ``what`` happened to ``stage``, now."""
        self.events.append({"at_s": time.monotonic() - self._started_s, "stage": stage, "what": what} | more)

    @property
    def bytes_moved(self) -> int:
        """Bytes that came over all links, those of failed attempts included."""
        return sum(link.bytes_moved for link in self._links)

    def prepare(self) -> None:
        """Import all that computes, and let stage 1 be read meanwhile. Raises what an import raises, and StageError for
        a device that is not here."""
        self.read_ahead()
        fresh = "torch" not in sys.modules
        with uncollected() if fresh else nullcontext():  # what a process in mid-life holds may be garbage
            from firsttoken.engine import engine, live_executor  # noqa: F401
            from firsttoken.progressiveserve.loading import loader  # noqa: F401
            from firsttoken.progressiveserve.staged_serving import stage_versions, transitions  # noqa: F401
        check_device(self._device)
        self.prepared = True

    def read_ahead(self) -> None:
        """Begin to read stage 1, where that can be done without torch; what is wrong with it is for :meth:`first`."""
        if self._device != "cpu":  # the load wants pinned memory
            return
        with suppress(FirstTokenError):
            manifest = read_manifest(self._folder)
            with self._lock:
                if self.closing.is_set():
                    return
                self._early = open_reader(self._folder, manifest, [1], self._links, threads=self._threads)

    def first(self) -> StageLoad:
        """Begin to load stage 1. Raises ModelError, StageError or LinkError when it cannot begin."""
        import torch

        from firsttoken.progressiveserve.loading.meta_model import Skeleton
        from firsttoken.progressiveserve.loading.tensor_placement import build_lean, torch_dtype
        from firsttoken.progressiveserve.loading.weight_builder import Maker

        manifest = read_manifest(self._folder)
        self.stages = len(manifest.stages)
        self.bytes_total = sum(
            blob.bytes
            for stage in range(1, self.stages + 1)
            for blobs in (adapter_blobs, part_blobs)
            for blob in blobs(self._folder, manifest, [stage])
        )
        computing = dtypes.serving(self._dtype, torch_dtype(manifest.dtype), self._device)
        with self._lock:
            if self._early is not None and not isinstance(self._early, Maker):
                self._early = Maker(manifest, [1], self._early, torch.device(self._device), computing)
        # a file that is not there yet may still be on its way, as a part of the model may; what a file says stays
        with files_alone() if (self._folder / CONFIG).is_file() else nullcontext():
            self.skeleton = Skeleton(self._folder, manifest, self._device, computing, build_lean)
        self._manifest: Manifest = manifest
        return self._load(1, self.skeleton.empty_view())

    def later(self, view: StageView) -> Iterator[StageView]:
        """The views of stages 2 and up, each when it is whole; ends early when the growth is closed."""
        for stage in range(2, self.stages + 1):
            arrived = self.insist(stage, partial(self._bring, stage, view))
            if arrived is None:
                return
            view = arrived
            self.note(stage, "arrived", **self._merging())
            yield view

    def insist(
        self, stage: int, attempt: Callable[[], StageView], failed: Callable[[Exception], None] = lambda error: None
    ) -> StageView | None:
        """What ``attempt`` returns, called until it raises nothing, ``failed`` after each time it does. Raises NoHope.

        None when the growth is closed first. Any kind of exception is caught: a thread that dies would leave its
        clients waiting for ever.
        """
        pause = self._retry_s
        while not self.closing.is_set():
            self.note(stage, "loading")
            try:
                view = attempt()
                self.error, self._loading = "", None  # the load holds its stage's layers
                return view
            except Exception as error:
                if self.closing.is_set():
                    break
                self.error = f"stage {stage}: {first_line(error)}"
                self.note(stage, f"failed: {first_line(error)}")
                if isinstance(error, NoHope):
                    raise
                print(f"firsttoken: {self.error}; it is tried again in {pause:g} s", file=sys.stderr, flush=True)
                failed(error)
                self.closing.wait(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)
        return None

    def ended_by(self, error: Exception) -> bool:
        """Whether ``error`` is what ended the load that was under way."""
        return self._loading is not None and self._loading.failure is error

    def close(self) -> None:
        """Stop the load that is under way, and begin no other."""
        self.closing.set()
        with self._lock:
            load, early = self._loading, self._early
        for reading in (load, early):
            if reading:
                reading.close()

    def _merging(self) -> dict[str, float]:
        """What it took to merge a stage into weights that were there: bytes of these, seconds in all and of the longest
        merge between two steps."""
        spent, self.skeleton.merges.spent = self.skeleton.merges.spent, []
        if not spent:
            return {}
        seconds = [merging.seconds for merging in spent]
        size = sum(merging.bytes for merging in spent)
        return {"merged_bytes": size, "merging_s": sum(seconds), "longest_merge_s": max(seconds)}

    def _bring(self, stage: int, previous: StageView) -> StageView:
        return self._load(stage, previous).wait()

    def _load(self, stage: int, previous: StageView) -> StageLoad:
        from firsttoken.progressiveserve.loading.loader import StageLoad

        with self._lock:
            early, self._early = self._early, None  # whose it is from now on
        options = {"threads": self._threads, "maker": early}
        load = StageLoad(self._folder, self._manifest, [stage], self._links, self.skeleton, previous, **options)
        with self._lock:
            self._loading = load
        if self.closing.is_set():
            load.close()
        return load
