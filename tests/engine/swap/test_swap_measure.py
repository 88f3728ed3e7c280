"""The rows of a measurement: one for each repeat, with the counts of the request, and nothing left behind."""

from __future__ import annotations

import pytest
import torch

from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.swap import PATHS, make_path
from firsttoken.engine.swap.host_pool import HostPool
from firsttoken.study.errors import RequestError
from firsttoken_studies.nb21_swap_or_recompute.study import memcpy_rows, swap_rows

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=8, dtype=torch.bfloat16, block_tokens=4)
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PATHS)
def test_swaps_are_counted_and_leave_the_pool_as_it_was(name: str, device: str) -> None:
    pool, host_pool = KVPool(SHAPE, 16, device), HostPool(SHAPE, 8, pinned=device == "cuda")
    pool.rows.normal_()
    before = pool.rows.clone()
    path = make_path(name, pool, host_pool)
    rows = swap_rows(path, [7, 32], repeats=3, seed=1)
    path.close()
    assert [(row["tokens"], row["repeat"]) for row in rows] == [(t, r) for t in (7, 32) for r in range(3)]
    for row in rows:
        assert row["path"] == name and row["block_tokens"] == 4
        assert row["copies"] == (SHAPE.copies(row["tokens"]) if name == "per_block" else 1)
        assert row["bytes"] == SHAPE.blocks(row["tokens"]) * SHAPE.block_bytes
        assert min(row["out_ms"], row["prep_ms"], row["in_ms"]) > 0
    assert torch.equal(pool.rows, before) and host_pool.free == 8


@pytest.mark.parametrize("device", DEVICES)
def test_the_ceiling_copies_as_many_bytes_both_ways(device: str) -> None:
    rows = memcpy_rows(SHAPE, [7, 32], repeats=2, device=device)
    expected = [(t, r, way) for t in (7, 32) for r in range(2) for way in ("out", "in")]
    assert [(row["tokens"], row["repeat"], row["direction"]) for row in rows] == expected
    assert all(row["bytes"] == SHAPE.blocks(row["tokens"]) * SHAPE.block_bytes and row["ms"] > 0 for row in rows)
    assert memcpy_rows(SHAPE, [], repeats=2, device=device) == []


@pytest.mark.parametrize("tokens, message", [(68, "17 blocks; the pool has 16"), (0, "0 blocks"), (36, "9 host bloc")])
def test_a_length_that_does_not_fit_is_refused(tokens: int, message: str) -> None:
    host_pool = HostPool(SHAPE, 8, pinned=False)
    with pytest.raises(RequestError, match=message):
        swap_rows(make_path("coalesced", KVPool(SHAPE, 16), host_pool), [tokens], repeats=1, seed=0)
    assert host_pool.free == 8
