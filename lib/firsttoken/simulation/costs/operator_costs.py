"""A step on a GPU that nobody has here: the sum of its operators, as measured on that card one by one.

Matrix products, attention and all-reduces come from measured tables. Norms, rotary angles, activations and the writing
of keys and values were not measured: each is charged the bytes that it moves at the rate that the tables' authors state
for such kernels, and the least time that one takes. Nothing is fitted to a run of a server.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firsttoken.assets.dense_shape import DenseShape
from firsttoken.engine.costs.cost_model import Costs, follow
from firsttoken.simulation.costs.operator_tables import CONTEXT, GENERATION, Curve, OperatorTables, power_between
from firsttoken.study.errors import ProfileError

MOST_TOKENS = 1 << 14  # tokens of a batch that are reckoned once; beyond them the last slope goes on
MOST_REQUESTS = 1 << 11
_ARRAYS_FROM = 8  # steps: arrays take 19 us for any number up to 24, one step after the other 2.7 us each
_BYTES = {"bfloat16": 2, "fp8": 1}
Line = tuple[list[float], list[float]]
"""A curve as lists, of which one number is read faster than of arrays."""
_ROOM = 0.9  # of the card's memory that an engine takes (vLLM's gpu_memory_utilization)
_OTHER_BYTES = 3758096384  # that are neither weights nor keys and values, as the tables' authors state it for each card


@dataclass(frozen=True)
class OperatorCosts(Costs):
    """The seconds of a step of ``shape`` split over ``gpus`` cards (tensor parallel), one operator after the other.

    The attention of a chunk behind a prefix is that of a whole prompt up to the chunk's end, less that of one up to its
    beginning, since the tables' prompts begin with an empty cache. Decodes count as so many at their mean context. The
    host's time between two steps is in no table, and none is charged.

    ``beyond`` names the products that are wider than any in the table, which grow in proportion to their width. Beyond
    the longest prompt of the table attention grows with the square of the length, and beyond the longest context or the
    largest batch that of decodes in proportion.
    """

    shape: DenseShape
    gpus: int
    blocks: int
    beyond: tuple[str, ...]
    swap_bytes_s: float
    kv_bytes: int
    once: np.ndarray  # [tokens]: seconds of everything but attention and head, all layers
    heads: np.ndarray  # [requests]: seconds of the head
    context: Line  # seconds of one layer's attention of one prompt, by its tokens
    generation: tuple[tuple[int, Line], ...]  # by batch, ascending: seconds of one layer's, by tokens in the cache

    @classmethod
    def of(
        cls,
        tables: OperatorTables,
        shape: DenseShape,
        gpus: int = 1,
        *,
        weights: str = "bfloat16",
        kv: str = "bfloat16",
        block_tokens: int = 16,
    ) -> OperatorCosts:
        """The costs of ``shape`` on ``gpus`` of the card of ``tables``, weights and cache stored as named.

        Raises ProfileError for heads that cannot be split over so many GPUs, a number of GPUs, a type or heads that no
        table has, and a model that does not fit.
        """
        if shape.heads % gpus or shape.mlp % gpus or (shape.kv_heads % gpus and gpus % shape.kv_heads):
            split = f"{shape.heads} heads, {shape.kv_heads} of keys and values, and an MLP of {shape.mlp}"
            raise ProfileError(f"{split} cannot be split over {gpus} GPUs")
        if kv not in _BYTES or weights not in _BYTES:
            raise ProfileError(f"no operators of {weights} weights over a {kv} cache; known: {', '.join(_BYTES)}")
        heads, kv_heads = shape.heads // gpus, max(shape.kv_heads // gpus, 1)
        attention, mlp = heads * shape.head_dim, shape.mlp // gpus
        widths = (
            ((heads + 2 * kv_heads) * shape.head_dim, shape.hidden),
            (shape.hidden, attention),
            (2 * mlp, shape.hidden),
            (shape.hidden, mlp),
        )
        tokens = np.arange(1, MOST_TOKENS + 1, dtype=float)
        products = [tables.product(weights, n, k) for n, k in widths]
        layer = sum(power_between(tokens, curve) for curve, _ in products)
        if gpus > 1:
            layer = layer + 2 * power_between(tokens * shape.hidden * 2, tables.all_reduce(gpus))
        layer = layer + _small_kernels_s(tables, shape, gpus, tokens, quantised=weights != "bfloat16")
        head, wide = tables.product("bfloat16", -(-shape.vocabulary // gpus), shape.hidden)
        beyond = [f"products of {n} x {k}" for (n, k), (_, out) in zip(widths, products, strict=True) if out]
        if wide:
            beyond.append(f"the head's product of {shape.vocabulary // gpus} x {shape.hidden}")
        room = _ROOM * tables.memory_bytes - shape.weights * _BYTES[weights] / gpus - _OTHER_BYTES
        token = shape.kv_bytes(_BYTES[kv]) * kv_heads / shape.kv_heads
        if (blocks := int(room / token / block_tokens)) < 1:
            raise ProfileError(
                f"weights of {shape.weights * _BYTES[weights] / gpus / 1e9:.1f} GB on each of {gpus} {tables.card} "
                "leave no room for keys and values; take more GPUs, or fp8"
            )
        prompts = tables.attention(CONTEXT, heads, kv_heads, shape.head_dim, kv)
        decodes = tables.attention(GENERATION, heads, kv_heads, shape.head_dim, kv)
        return cls(
            shape,
            gpus,
            blocks,
            tuple(beyond),
            tables.pcie_bytes_s,
            shape.kv_bytes(_BYTES[kv]),
            np.concatenate([[0.0], shape.layers * layer]),
            np.concatenate([[0.0], power_between(np.arange(1, MOST_REQUESTS + 1, dtype=float), head)]),
            _line(prompts[1]),
            tuple((batch, _line(decodes[batch])) for batch in sorted(decodes)),
        )

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        tokens = sum(new for _, new in prefills) + len(contexts)
        if not tokens:
            return 0.0
        attention = sum(self._chunk_s(cached, new) for cached, new in prefills)
        if contexts:
            attention += self._decodes_s(len(contexts), sum(contexts) / len(contexts))
        rest = follow(self.once, tokens) + follow(self.heads, len(prefills) + len(contexts))
        return rest + self.shape.layers * attention

    def decode_steps_s(self, contexts: Sequence[int], steps: int) -> list[float]:
        """To the bit what :meth:`step_s` says of each step, in one calculation with arrays."""
        count = len(contexts)
        if not count or steps < _ARRAYS_FROM:
            return super().decode_steps_s(contexts, steps)
        means = (sum(contexts) + count * np.arange(steps)) / count
        around, share = self._batches(count)
        high, *low = (_cache_steps_s(self.generation[index][1], means) for index in around)
        attention = high * max(1.0, count / self.generation[around[0]][0])
        if low:
            attention = (1 - share) * low[0] + share * attention
        rest = follow(self.once, count) + follow(self.heads, count)
        return (rest + self.shape.layers * attention).tolist()

    def swap_out_s(self, tokens: int) -> float:
        """Charge the bytes of keys and values at the card's PCIe rate, every GPU its own share."""
        return tokens * self.kv_bytes / self.gpus / self.swap_bytes_s

    swap_in_s = swap_out_s

    def _chunk_s(self, cached: int, new: int) -> float:
        """Seconds of one layer's attention of ``new`` tokens behind ``cached``, at least those of the least kernel."""
        prompt_s = _prompt_s(self.context, cached + new)
        return max(prompt_s - _prompt_s(self.context, cached), self.context[1][0]) if cached else prompt_s

    def _decodes_s(self, count: int, context: float) -> float:
        """Seconds of one layer's attention of ``count`` decodes at ``context`` tokens: lines between the batches and
        the contexts that were measured, both going on in proportion."""
        around, share = self._batches(count)
        above, line = self.generation[around[0]]
        high = _cache_s(line, context) * max(1.0, count / above)
        if len(around) == 1:
            return high
        return (1 - share) * _cache_s(self.generation[around[1]][1], context) + share * high

    def _batches(self, count: int) -> tuple[tuple[int, ...], float]:
        """The places in ``generation`` of the measured batch above ``count`` and, where it lies between two, of that
        below; and the share of the former."""
        batches = self.generation
        right = next((i for i, (batch, _) in enumerate(batches) if batch >= count), len(batches) - 1)
        above = batches[right][0]
        if right == 0 or above <= count:
            return (right,), 1.0
        below = batches[right - 1][0]
        return (right, right - 1), (count - below) / (above - below)


def _line(curve: Curve) -> Line:
    sizes, seconds = curve
    return sizes.tolist(), seconds.tolist()


def _prompt_s(line: Line, tokens: float) -> float:
    return _between(line, tokens) * max(1.0, tokens / line[0][-1]) ** 2


def _cache_s(line: Line, context: float) -> float:
    return _between(line, context) * max(1.0, context / line[0][-1])


def _cache_steps_s(line: Line, contexts: np.ndarray) -> np.ndarray:
    """:func:`_cache_s` of each of ``contexts`` [steps], ascending, to the bit."""
    sizes, seconds = np.array(line[0]), np.array(line[1])
    upper = np.clip(np.searchsorted(sizes, contexts, side="right"), 1, max(1, len(sizes) - 1))
    lower = upper - 1
    upper = np.minimum(upper, len(sizes) - 1)
    width = np.where(upper > lower, sizes[upper] - sizes[lower], 1.0)
    interpolated = seconds[lower] + (contexts - sizes[lower]) / width * (seconds[upper] - seconds[lower])
    interpolated = np.where(contexts < sizes[0], seconds[0], np.where(contexts >= sizes[-1], seconds[-1], interpolated))
    return interpolated * np.maximum(1.0, contexts / sizes[-1])


def _between(line: Line, size: float) -> float:
    """Interpolate ``line`` at ``size`` as ``numpy.interp`` does, which takes four times as long for one number (0.73
    and 0.19 us)."""
    sizes, seconds = line
    right = bisect_right(sizes, size)
    if right in (0, len(sizes)):
        return seconds[min(right, len(sizes) - 1)]
    share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


def _small_kernels_s(
    tables: OperatorTables, shape: DenseShape, gpus: int, tokens: np.ndarray, *, quantised: bool
) -> np.ndarray:
    """Seconds of a layer's kernels that are in no table, by tokens of the batch.

    Two norms with their residual sums, rotary angles, the writing of keys and values, the gated activation; norms of
    the heads where the model has them. Quantising is part of the norms and of the activation, as vLLM fuses it, but for
    the attention's output, which takes a kernel of its own.
    """
    hidden, mlp = 2 * shape.hidden, 2 * shape.mlp // gpus
    kv = 2 * max(shape.kv_heads // gpus, 1) * shape.head_dim * 2
    queries = 2 * shape.heads // gpus * shape.head_dim
    moved = [4 * hidden, 4 * hidden, 2 * (queries + kv), 2 * kv, 3 * mlp]
    moved += [2 * (queries + kv)] * shape.head_norms + [1.5 * queries] * quantised
    return np.asarray(sum(moved) * tokens / tables.memory_bytes_s + len(moved) * tables.kernel_s)
