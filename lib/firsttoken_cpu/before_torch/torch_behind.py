"""One answer whose first tokens wait for no import of torch: the engine takes it over between two of its tokens.

Nothing here imports torch but the thread that runs behind the answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from firsttoken.engine.request import Sampling
from firsttoken.study import dtypes
from firsttoken.study.errors import RequestError, StageError
from firsttoken.study.system.importing import without_collector
from firsttoken_cpu.before_torch.numpy_model import BLOCK_TOKENS, CacheSource, NumpyModel, as_tensor, beside_an_import

if TYPE_CHECKING:
    from firsttoken.engine.engine import Engine
    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken_cpu.before_torch.numpy_weights import FolderWeights


class EngineHandover:
    """Imports torch in a thread behind one answer of ``model``, which has all of its weights, and lets an engine with
    them go on.

    ``ready_s`` is when that was there (``time.monotonic``), ``tokens`` how many the model had said when it took over,
    and ``took_s`` the seconds from then to its first token; all are None before.
    """

    def __init__(self, model: NumpyModel) -> None:
        self.model = model
        self.ready_s: float | None = None
        self.tokens: int | None = None
        self.took_s: float | None = None
        self._engine: Engine | None = None
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._import, name="importing", daemon=True)
        self._begun = False

    def answer(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """Yield ``count`` greedy tokens after ``prompt``: the model's until torch is there, and then the engine's.

        The import begins when the second token is asked for, or :meth:`made`: the first one has all cores to itself
        until somebody has it. Raises RequestError for a count below 1, what :meth:`NumpyModel.next_token` raises, and
        StageError when torch or what computes cannot be imported.
        """
        if count < 1:
            raise RequestError(f"an answer has at least 1 token, not {count}")
        output: list[int] = []
        for token in self._before(prompt, count):
            output.append(token)
            yield token
        if len(output) < count:
            begun, self.tokens = time.monotonic(), len(output)
            for token in self._go_on([*prompt, *output], count - len(output)):
                self.took_s = self.took_s or time.monotonic() - begun
                yield token

    def made(self) -> Engine:
        """Return the engine that goes on, once it is there. Raises StageError when it cannot be made."""
        self._begin()
        self._thread.join()
        if self._engine is None:
            raise StageError(f"what computes cannot be imported: {self._fault}; install firsttoken again")
        return self._engine

    def _before(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """Yield at most ``count`` tokens of the model."""
        token = self.model.next_token(prompt)
        yield token
        self._begin()
        with beside_an_import(self.model):
            for _ in range(count - 1):
                if not self._thread.is_alive():
                    return
                token = self.model.next_token([token])
                yield token

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._thread.start()

    def _import(self) -> None:
        try:
            with without_collector():
                from firsttoken.engine.engine import Engine

                self._engine = Engine(take_over(self.model, -(-self.model.context // BLOCK_TOKENS)))
        except Exception as error:
            self._fault = error
        self.ready_s = time.monotonic()

    def _go_on(self, tokens: list[int], count: int) -> Iterator[int]:
        """Yield ``count`` more tokens after ``tokens``, of which the model has computed all but the last."""
        engine = self.made()
        request = engine.submit(tokens, Sampling(count), source=CacheSource(self.model))
        while not request.finished:
            for _, token in engine.step():
                yield token
        if request.failure is not None:
            raise request.failure


def take_over(model: NumpyModel, blocks: int, host_blocks: int = 0) -> LiveExecutor:
    """Return an executor for the weights of ``model``, those of a plain folder, over a pool of ``blocks`` KV blocks,
    and as many of ``host_blocks`` in host memory.

    The packed weights are the same memory; what is small is read, and so is the embedding. Layers are in the executor's
    version, fused; its plain model has none. That version computes all that ``model`` computes with the same kernels,
    also where others are faster here.
    """
    import torch
    from torch import nn

    from firsttoken.assets.empty_model import set_parameter
    from firsttoken.engine.decoder import LocalSegment
    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken_cpu.fused import FusedLayer
    from firsttoken_cpu.lean.lean_model import lean_on_meta
    from firsttoken_cpu.native_attend import by_kernels

    weights: FolderWeights = model.weights
    plain = lean_on_meta(weights.files.folder, dtypes.named(model.dtype))
    for name in weights.small:
        set_parameter(plain, name, as_tensor(model, weights.parameter(name)))
    plain.tie_weights()
    layers = zip(plain.model.layers, weights.panels, strict=True)
    segment = LocalSegment([FusedLayer(layer, panels) for layer, panels in layers])
    options = {"block_tokens": BLOCK_TOKENS, "host_blocks": host_blocks, "device": torch.device("cpu")}
    executor = LiveExecutor(plain, blocks, segments=[segment], touched=False, **options)
    plain.model.layers = nn.ModuleList()
    head, executor.version.attend = by_kernels(plain.lm_head, weights.head().panels["head"])
    executor.version.decoder.set_head(head)
    threading.Thread(target=weights.packer.memory.collapse, name="huge pages", daemon=True).start()  # 5 ms a page
    return executor
