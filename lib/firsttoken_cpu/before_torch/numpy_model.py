"""A Llama or Qwen2 decoder by numpy and the kernels alone, which answers one request while torch is being imported.

It computes layer by layer what the fused engine computes, with the same kernels over weights in the same panels, so an
engine can take weights and cache over between two tokens (``torch_behind.py``). A first token waits for the weights,
whose layers are packed and run in the order of the model, and for neither torch nor transformers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.study import dtypes
from firsttoken.study.errors import LengthError, OutputError, RequestError
from firsttoken.study.system.cgroup_limits import cores
from firsttoken_cpu.before_torch.numpy_weights import NumpyWeights
from firsttoken_cpu.lean.lean_config import scaled_frequencies
from firsttoken_cpu.native.exports import STORAGE, LayerStruct, PagedStruct, narrowed, widened

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_TOKENS = 16  # of the cache
_TURN_S = 0.0005  # after which the thread that imports lets go of the interpreter, if it can


class NumpyModel:
    """The model of ``weights``, computing on ``threads`` cores (all, unless given) for one request.

    That has at most ``context`` tokens, or as many as the model has positions. A layer that the weights do not bring is
    passed, as ProgressiveServe's first stage passes those that are still to come (PassLayer, 3.3).
    """

    def __init__(self, weights: NumpyWeights, context: int = 4096, threads: int | None = None) -> None:
        self.weights = weights
        self.config, self.dtype = weights.packer.config, weights.packer.dtype
        self.threads = threads or cores()  # of the calls to come
        config = self.config
        self.context = min(context, config.max_position_embeddings)
        blocks = -(-self.context // BLOCK_TOKENS)
        kv = (blocks, config.num_hidden_layers, 2, BLOCK_TOKENS, config.num_key_value_heads, config.head_dim)
        self.cache = np.zeros(kv, STORAGE[self.dtype])  # as KVPool has it; its first ``cached`` tokens are written
        self.cached = 0
        self._tables = np.arange(blocks, dtype=np.int64)
        steps = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        self._frequencies = scaled_frequencies(config, steps, np.where).astype(np.float32)

    def next_token(self, tokens: Sequence[int]) -> int:
        """The likeliest token after ``tokens``. Caches them, and raises, as :meth:`logits`."""
        return int(self.logits(tokens).argmax())

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits [vocabulary] in float32 after ``tokens``, which follow those that are cached, and are cached then.

        Raises RequestError for none, or for one outside the vocabulary; LengthError for more than fit; OutputError
        where the largest logit is no finite number; and what the weights raise that do not come.
        """
        ids = np.array(tokens, dtype=np.int64)
        if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise RequestError(f"the prompt is empty, or holds no token id of the model's {self.config.vocab_size}")
        if self.cached + len(ids) > self.context:
            raise LengthError(f"{self.cached + len(ids)} tokens do not fit a context of {self.context}; shorten it")
        positions = np.arange(self.cached, self.cached + len(ids), dtype=np.int64)
        states, rotary = self.weights.rows(ids), self._rotary(positions)
        for layers in self.weights.layers():
            self._run(layers, states, rotary, positions)
        self.cached += len(ids)
        logits = self._logits(states[-1:])
        if not np.isfinite(logits.max()):
            raise OutputError("the model's output is no finite number; copy its weights again")
        return logits

    def _run(
        self,
        layers: ctypes.Array[LayerStruct],
        states: np.ndarray,
        rotary: tuple[np.ndarray, np.ndarray],
        positions: np.ndarray,
    ) -> None:
        """``states`` [tokens, hidden] through ``layers``, in place; their keys and values are cached."""
        config, tokens = self.config, len(states)
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        scratch = config.hidden_size + (2 * heads + 2 * kv_heads) * width + config.intermediate_size
        numbers, sequences = np.empty(tokens * scratch, states.dtype), np.zeros(tokens, np.int64)
        contexts = positions + 1
        addresses = (array.ctypes.data for array in (self.cache, self._tables, sequences, contexts))
        sizes = (len(self._tables), tokens, kv_heads, width, BLOCK_TOKENS, self.cache[0].size)
        scales = (config.rms_norm_eps, width**-0.5)
        threads = self.threads if self.weights.packed else 1  # the others pack
        paged = PagedStruct(*addresses, *sizes)
        self._call("run_layers", layers, 1, None, len(layers), states, *rotary, paged, numbers, *scales, threads)

    def _logits(self, states: np.ndarray) -> np.ndarray:
        """Return the logits [vocabulary] in float32 of the last of ``states`` [1, hidden]."""
        normed = np.empty_like(states)
        logits = np.empty(self.config.vocab_size, states.dtype)
        sizes = (1, self.config.hidden_size, self.config.rms_norm_eps, self.threads)
        self._call("rms_norm", states, self.weights.norm(), normed, *sizes)
        self._call("product", normed, 1, self.weights.head().struct, None, logits, self.threads)
        return widened(logits)

    def _rotary(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [tokens, head_dim] of ``positions``."""
        angles = positions[:, None].astype(np.float32) * self._frequencies
        both = np.concatenate((angles, angles), axis=1)
        return narrowed(np.cos(both), self.dtype), narrowed(np.sin(both), self.dtype)

    def _call(self, name: str, *arguments: Any) -> None:
        self.weights.packer.exports.call(name, self.dtype, *arguments)


@contextmanager
def beside_an_import(model: NumpyModel) -> Iterator[None]:
    """Within the block ``model`` computes with one core less and the interpreter switches threads more often, so that a
    thread can import torch beside it."""
    before, model.threads = model.threads, max(1, model.threads - 1)
    turn = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(turn)
        model.threads = before


def as_tensor(model: NumpyModel, array: np.ndarray) -> Tensor:
    """``array``, numbers of the dtype that ``model`` computes in, as a tensor in the same memory."""
    import torch

    return torch.from_numpy(array).view(dtypes.named(model.dtype))


class CacheSource:
    """The cache of ``model``, as a source of how a request begins: there at once, and copied layer by layer."""

    redo = range(0)
    complete = True

    def __init__(self, model: NumpyModel) -> None:
        self._model, self.tokens, self._delivered = model, model.cached, False

    def begin(self) -> None:
        """Do nothing, as the keys and values are here."""

    def hidden_states(self) -> None:
        """Bring none, as no layer is computed again."""

    def arrived(self) -> list[tuple[int, Tensor]]:
        """Return all layers at the first call, then none."""
        if self._delivered:
            return []
        self._delivered = True
        rows = as_tensor(self._model, self._model.cache[: -(-self.tokens // BLOCK_TOKENS)])
        blocks, layers, _, block_tokens, heads, width = rows.shape
        laid = rows.permute(1, 2, 4, 0, 3, 5).reshape(layers, 2, 1, heads, blocks * block_tokens, width)
        return list(enumerate(laid))

    def close(self) -> None:
        """Do nothing: the model keeps its cache."""
