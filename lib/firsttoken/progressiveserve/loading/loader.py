"""Loading one or several stages of a staged checkpoint (ProgressiveServe, 3.4; here also the whole model at once).

The first load and every later stage are the same thing: files are read in the order of the forward pass, a placer
thread turns each into parameters, and whoever computes waits for the layer it needs and for no other
(layer-streamed prefill).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from firsttoken.assets.empty_model import set_parameter
from firsttoken.engine.lora import Adapter, parse_adapter, shared_copy
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import Manifest, PartFile, check_side
from firsttoken.progressiveserve.loading.host_memory import BUFFERS, memory_for
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.loading.read_memory import cpu_memory
from firsttoken.progressiveserve.loading.read_plan import Folder, adapter_blobs, open_reader, part_blobs, parts_of
from firsttoken.progressiveserve.loading.reader import Blob
from firsttoken.progressiveserve.loading.views import StageView, check_loaded, make_view
from firsttoken.progressiveserve.loading.weight_builder import BuiltPart, WeightBuilder, on_pinned_core
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.study.errors import ModelError

_SWITCH_S = 0.015
"""What torch 2.13 takes to multiply with another number of threads for the first time: it compiles its products anew
(SmolLM2-135M in bf16, two cores: the next layer takes 15 to 20 ms instead of 1 to 2)."""


class StageLoad:
    """One load of ``stages`` on top of ``previous``. :attr:`view` computes while it arrives, inside
    :meth:`streaming`.

    ``builder`` is one that has begun with what a reader of the same stages brings, before there was a skeleton.
    Making the object waits for the adapter, if there is one, and for nothing else. ``verify`` holds every file against
    its sha256, those beside the weights with the first stage. Raises what the reader raises, and ModelError.
    """

    def __init__(
        self,
        folder: Folder,
        manifest: Manifest,
        stages: Sequence[int],
        links: Sequence[Link],
        meta_model: MetaModel,
        previous: StageView,
        *,
        threads: int = 8,
        verify: bool = True,
        builder: WeightBuilder | None = None,
    ) -> None:
        self._manifest, self._meta_model = manifest, meta_model
        self.parts = parts_of(manifest, stages)
        adapters = adapter_blobs(folder, manifest, stages)
        if builder is None:
            blobs = adapters + part_blobs(folder, manifest, stages)
            if meta_model.device.type == "cpu":
                memory = cpu_memory(all(part.refines for part in self.parts), len(links))
            else:  # with several links files are read long before their turn, and hold their buffers until then
                buffers = BUFFERS if len(links) == 1 else max(1, len(blobs))
                memory = memory_for(meta_model.device, max((blob.bytes for blob in blobs), default=0), buffers)
            reader = open_reader(
                folder, manifest, stages, links, threads=threads, verify=verify, allocate=memory.allocate
            )
            builder = WeightBuilder(manifest, stages, reader, meta_model.device, meta_model.dtype, memory)
        self._builder = builder
        self._placed: list[Future[torch.cuda.Event | None]] = [Future() for _ in self.parts]
        self.failure: Exception | None = None
        """What ended the load before it was whole; what a forward pass behind its layers raises then is this."""
        self._placed_count = 0  # of these, so far
        self._targets: dict[int | str, nn.Module] = {}
        self.stalled_s = 0.0  # that forward passes inside streaming() waited
        self._placing_s = 0.0
        self._all_cores = 0  # that a forward pass found, 0 before the first
        self._computing_s = math.inf  # when a forward pass was let go on last, by time.perf_counter
        self.arrived_s = 0.0  # time.monotonic when the last parameter was in its place
        try:
            if verify and not previous.stage:
                check_side(meta_model.folder, manifest)
            adapter = self._adapter(adapters, manifest.stages[max(stages) - 1].name)
            self.view = self._assemble(previous, max(stages), adapter)
        except BaseException:
            self.close()
            raise
        self._placer = on_pinned_core("placer", self._place_all)

    def _adapter(self, blobs: Sequence[Blob], stage: str) -> Adapter | None:
        if not blobs:
            return None
        settled = [self._builder.memory.to_device(self._builder.reader.wait(i))[0] for i in range(len(blobs))]
        config, weights = (data.cpu().numpy().tobytes() for data in settled)
        return parse_adapter(f"of stage {stage}", config, weights, self._meta_model.device)

    def _assemble(self, previous: StageView, stage: int, adapter: Adapter | None) -> StageView:
        base, end_modules = list(previous.base), dict(previous.ends)
        for part in self.parts:
            if part.layer is not None:
                # A layer that serves already takes other weights in a copy: requests may stay with the earlier stage,
                # which goes on with its own. (What refines weights changes these themselves, for all stages.)
                present = not isinstance(previous.base[part.layer], PassLayer)
                old = base[part.layer] if present else self._meta_model.layers[part.layer]
                base[part.layer] = shared_copy(old, own_parameters=True) if present else old
                self._targets[part.layer] = base[part.layer]
        if previous.stage and any(part.layer is None for part in self.parts):
            end_modules = {name: shared_copy(module, own_parameters=True) for name, module in end_modules.items()}
        self._targets |= end_modules
        return make_view(stage, base, end_modules, adapter)

    def _place_all(self) -> None:
        try:
            for placed, part in zip(self._placed, self.parts, strict=True):
                placed.set_result(self._to_device(part, self._builder.next_part()))
            self.arrived_s = time.monotonic()
            brought = self._manifest.stages[: self.view.stage]
            check_loaded(self.view, {part.layer for stage in brought for part in stage.parts if part.layer is not None})
        except Exception as error:
            self.failure = error
            self._builder.stop()
            for placed in self._placed:
                if not placed.done():
                    placed.set_exception(error)

    def _to_device(self, part: PartFile, made: BuiltPart) -> torch.cuda.Event | None:
        begin = time.perf_counter()
        for name, weights in made.weights.items():
            set_parameter(*self._target(part, name), weights)
        if part.refines:
            self._meta_model.refiner(part.format).refine(part, made.file, partial(self._parameter, part))
            self._builder.memory.free(made.file)
        if self._manifest.tied and part.layer is None:
            head, embedding = self._targets["lm_head"], self._targets["embed_tokens"]
            head._parameters["weight"] = embedding._parameters["weight"]
        self._placing_s += time.perf_counter() - begin
        return made.copied

    @property
    def placing_s(self) -> float:
        """Seconds that were spent on parameters, not on waiting for bytes."""
        return self._builder.seconds + self._placing_s

    def _parameter(self, part: PartFile, name: str) -> nn.Parameter:
        module, leaf = self._target(part, name)
        return module.get_parameter(leaf)

    def _target(self, part: PartFile, name: str) -> tuple[nn.Module, str]:
        if part.layer is not None:
            return self._targets[part.layer], name.removeprefix(f"model.layers.{part.layer}.")
        module, _, leaf = name.removeprefix("model.").partition(".")
        if module not in self._targets:
            raise ModelError(f"{part.name} brings {name}, which this architecture does not have; stage it again")
        return self._targets[module], leaf

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Forward passes of the model inside the block wait for each layer as they come to it.

        Until all have come they leave one processor to whoever makes weights of bytes: of a product's threads all wait
        for the one that is not let run. Bits of 135 M weights, read at 16 Gbit/s, answered after 0.93 instead of 1.06 s
        so, and from a disk after 1.00 instead of 1.17 (medians of 7, turn by turn, two cores). They take it back where
        what is left saves more by it than the change costs.
        """
        with ExitStack() as gates:
            for index, part in enumerate(self.parts):
                for module in self._gated(part):
                    gates.callback(module.register_forward_pre_hook(self._gate(index)).remove)
            gates.callback(lambda: self._compute_with(self._all_cores))
            yield

    def _gated(self, part: PartFile) -> list[nn.Module]:
        if part.layer is not None:
            return [self.view.layers[part.layer]]
        names = {name.removeprefix("model.").partition(".")[0] for name in part.carried}
        return [self.view.ends[name] for name in names]

    def _compute_with(self, threads: int) -> None:
        """Set the number of ``threads`` of the forward pass, whose thread this is; a number that is set anew costs
        ``_SWITCH_S``."""
        if threads and threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def _gate(self, index: int) -> Callable[..., None]:
        def wait(*_: object) -> None:
            start = time.perf_counter()
            # if all took as long as the last
            remaining_s = max(0.0, start - self._computing_s) * (len(self.parts) - index)
            self.await_part(index)
            if self._meta_model.device.type == "cpu":
                self._all_cores = self._all_cores or torch.get_num_threads()
                fewer = max(1, self._all_cores - 1)
                if not self.arrived:
                    self._compute_with(fewer)
                elif remaining_s * (1 - fewer / self._all_cores) > _SWITCH_S:
                    self._compute_with(self._all_cores)
            self._computing_s = time.perf_counter()
            self.stalled_s += self._computing_s - start

        return wait

    def await_part(self, index: int) -> None:
        """Wait until part ``index`` of those in forward order is in its place. Raises what ended the load before."""
        if event := self._placed[index].result():
            torch.cuda.current_stream(self._meta_model.device).wait_event(event)

    def placed_parts(self) -> int:
        """Return how many of the first parts are in their places; the thread that asks may compute with them."""
        while self._placed_count < len(self._placed):
            future = self._placed[self._placed_count]
            if not future.done() or future.exception() is not None:
                break
            self.await_part(self._placed_count)
            self._placed_count += 1
        return self._placed_count

    @property
    def arrived(self) -> bool:
        """Return whether nothing is waited for any more: every weight is in its place, or the load failed."""
        return not self._placer.is_alive()

    def close(self) -> None:
        """Stop reading. Whoever waits for a layer that is not there gets a LinkError, and so does :meth:`wait`."""
        self._builder.close()

    def wait(self) -> StageView:
        """The view with every weight in its place. Raises LinkError, ModelError or StageError if the load failed."""
        self._placer.join()
        self._builder.reader.close()
        if self.failure:
            raise self.failure
        for index in range(len(self.parts)):
            self.await_part(index)
        return self.view
