"""A step of a mixture of experts on a GPU that nobody has here: measured operators, the experts' layer among them.

What a dense model's MLP takes is replaced by the kernel that sends each token to its experts, computes them and adds
them up, as the wheel aiconfigurator-core measured it whole; how unevenly tokens choose their experts is stated there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from firsttoken.assets.dense_shape import MixtureShape
from firsttoken.assets.lock import asset_path
from firsttoken.simulation.costs.operator_costs import MOST_TOKENS, OperatorCosts
from firsttoken.simulation.costs.operator_tables import Curve, OperatorTables, least_by_size, power_between, read_table
from firsttoken.study.errors import ProfileError

MIXTURE_CARDS = ("h100-sxm", "h200-sxm", "b200-sxm")
"""The cards whose tables of experts are pinned."""

_COLUMNS = ("moe_dtype", "hidden_size", "inter_size", "topk", "num_experts")
_SPLIT, _SPREAD, _TOKENS, _ROUTING = "moe_tp_size", "moe_ep_size", "num_tokens", "distribution"
_NUMBER_BYTES = 2
_EXPERTS = {"fp8": "fp8_block", "bfloat16": "bfloat16"}  # the tables' type of experts, by that of the weights


def layout(card: str, shape: MixtureShape, gpus: int) -> tuple[int, int]:
    """Return the layout of the experts on ``gpus``, (split, spread). Each expert is split over all GPUs where that was
    measured, as vLLM does by itself; otherwise experts are spread as far as they were. Raises ProfileError where no
    layout of so many was measured."""
    matching = [(split, spread) for split, spread in _layouts(card, shape) if split * spread == gpus]
    if not matching:
        raise ProfileError(_unmeasured(card, shape, f"on {gpus} GPUs"))
    return max(matching)


def mixture_costs(
    tables: OperatorTables, shape: MixtureShape, split: int, spread: int, *, routing: str = "power_law_1.2"
) -> OperatorCosts:
    """The costs of ``shape`` on ``split`` x ``spread`` of the card of ``tables``, and attention split over all of them.

    Each expert is split over ``split`` GPUs, and the experts are spread over ``spread``.
    Experts and the two products around attention are of the type that ``shape`` says; keys and values, head and router
    take 16 bits. The tables' products of ``fp8_block`` take 90 to 270 microseconds each, whatever their size,
    which is the time to launch their kernels one by one; a server launches them as one graph, so that ``fp8`` is taken,
    with as many bytes. Raises ProfileError for a card, a type, a layout or a routing that no table has, and
    what ``OperatorCosts.of`` raises.
    """
    gpus, dense = split * spread, shape.dense
    experts = experts_s(tables.card, shape, split, spread, routing)
    around = OperatorCosts.of(tables, shape.as_dense, gpus, weights=dense.stored)  # its MLP is taken out again below
    tokens = np.arange(1, MOST_TOKENS + 1, dtype=float)
    heads, kv_heads = dense.heads // gpus, max(dense.kv_heads // gpus, 1)
    queries, kv = heads * dense.head_dim, 2 * kv_heads * dense.head_dim
    layer, beyond = power_between(tokens, experts), []
    for dtype, n, k in (
        (dense.stored, queries + kv, dense.hidden),
        (dense.stored, dense.hidden, queries),
        ("bfloat16", shape.experts, dense.hidden),
    ):
        curve, wide = tables.product(dtype, n, k)
        layer = layer + power_between(tokens, curve)
        beyond += [f"products of {n} x {k}"] * wide
    if gpus > 1:
        layer = layer + 2 * power_between(tokens * dense.hidden * _NUMBER_BYTES, tables.all_reduce(gpus))
    moved = [4 * dense.hidden, 4 * dense.hidden, 2 * (queries + kv), 2 * kv, 2 * shape.experts]
    moved += [2 * (queries + kv)] * dense.head_norms + [1.5 * queries] * (dense.stored != "bfloat16")
    layer = layer + _NUMBER_BYTES * sum(moved) * tokens / tables.memory_bytes_s + len(moved) * tables.kernel_s
    beyond += [named for named in around.beyond if named.startswith("the head")]
    return replace(around, once=np.concatenate([[0.0], dense.layers * layer]), beyond=tuple(beyond))


def experts_s(card: str, shape: MixtureShape, split: int, spread: int, routing: str) -> Curve:
    """Seconds of one layer's experts on each GPU by the tokens of the batch, the fastest kernel of those measured.

    Raises ProfileError for what no table has, naming what was measured.
    """
    table, alike = _measured(card, shape)
    fits = alike & (table[_SPLIT] == split) & (table[_SPREAD] == spread)
    if not fits.any():
        raise ProfileError(_unmeasured(card, shape, f"split {split} and spread {spread} ways"))
    chosen = fits & (table[_ROUTING] == routing)
    if not chosen.any():
        distributions = ", ".join(sorted(set(table[_ROUTING][fits].tolist())))
        raise ProfileError(f"{card} has no experts under the routing {routing!r}; measured: {distributions}")
    return least_by_size(table[_TOKENS][chosen], table["latency"][chosen])


def _measured(card: str, shape: MixtureShape) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The table of ``card``, and which of its rows are of experts of this shape. ProfileError for another card."""
    if card not in MIXTURE_CARDS:
        raise ProfileError(f"no experts of {card!r} are pinned; known: {', '.join(MIXTURE_CARDS)}")
    dense, table = shape.dense, _experts(card)
    wanted = (_EXPERTS.get(dense.stored, dense.stored), dense.hidden, dense.mlp, shape.active, shape.experts)
    return table, np.logical_and.reduce([table[name] == value for name, value in zip(_COLUMNS, wanted, strict=True)])


def _layouts(card: str, shape: MixtureShape) -> list[tuple[int, int]]:
    """The layouts, (split, spread), in which experts of this shape were measured. ProfileError for another card."""
    table, alike = _measured(card, shape)
    return sorted(set(zip(table[_SPLIT][alike].tolist(), table[_SPREAD][alike].tolist(), strict=True)))


def _unmeasured(card: str, shape: MixtureShape, how: str) -> str:
    layouts = ", ".join(f"{split} x {spread}" for split, spread in _layouts(card, shape)) or "none"
    dtype = _EXPERTS.get(shape.dense.stored, shape.dense.stored)
    return (
        f"{card} has no {dtype} experts of {shape.dense.hidden} x {shape.dense.mlp}, {shape.active} of "
        f"{shape.experts}, {how}; measured for these: {layouts}"
    )


@lru_cache(maxsize=3)
def _experts(card: str) -> dict[str, np.ndarray]:
    return read_table(asset_path(f"{card}-experts.parquet"), (*_COLUMNS, _SPLIT, _SPREAD, _TOKENS, _ROUTING))
