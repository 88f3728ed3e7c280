"""Timing swaps of requests of given lengths, and the plain copies that they are held against."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from firsttoken.engine.kv import KVShape
from firsttoken.engine.swap.arena import HostArena
from firsttoken.engine.swap.path import CopyJob, SwapPath, start
from firsttoken.study.errors import RequestError

Row = dict[str, Any]


def swap_rows(path: SwapPath, tokens: Sequence[int], repeats: int, seed: int) -> list[Row]:
    """Rows {path, block_tokens, tokens, repeat, out_ms, prep_ms, in_ms, copies, bytes}, one for each swap out and in.

    The blocks of each length are drawn from the whole pool by ``seed``, so they lie in no order; all of its blocks must
    be free. Each length is swapped once before it counts. ``prep_ms`` is that of both ways, so that the three times add
    up to the swap latency (CPS, Table 2); ``copies`` and ``bytes`` are those of one way.

    Raises RequestError when a length does not fit the pool or the host pool.
    """
    shape, rng, rows = path.pool.shape, random.Random(seed), []
    for count in tokens:
        blocks = _draw(rng, path, count)
        span = path.arena.take(len(blocks))
        if span is None:
            raise RequestError(f"swap: {count} tokens need {len(blocks)} host blocks; {path.arena.largest} are free")
        try:
            for repeat in range(-1, repeats):
                there = path.out(blocks, span)
                back = path.into(span, blocks).wait()
                if repeat < 0:
                    continue
                times = {
                    "out_ms": there.copy_s * 1e3,
                    "prep_ms": (there.prep_s + back.prep_s) * 1e3,
                    "in_ms": back.copy_s * 1e3,
                }
                case = {"path": path.name, "block_tokens": shape.block_tokens, "tokens": count, "repeat": repeat}
                rows.append(case | times | {"copies": back.copies, "bytes": back.bytes})
        finally:
            path.arena.give(span)
    return rows


def memcpy_rows(shape: KVShape, tokens: Sequence[int], repeats: int, device: torch.device | str) -> list[Row]:
    """Rows {tokens, repeat, direction, ms, bytes} of one contiguous copy of as many bytes: what a swap can reach.

    ``direction`` is "out" (to the host: pinned with CUDA) or "in". On a CPU both are ``copy_`` between two tensors, by
    one thread, as the swap paths have it: with two threads and two busy cores each copy waited 8 to 16 ms for the
    second one. What all threads reach is the machine's ceiling (``study.ceilings``).
    """
    device = torch.device(device)
    arena = HostArena(shape, max(map(shape.blocks, tokens), default=1), pinned=device.type == "cuda")
    host = arena.all_rows
    there = torch.zeros_like(host, device=device)
    rows = []
    with _one_thread():
        for count, repeat in product(tokens, range(-1, repeats)):
            blocks = shape.blocks(count)
            for direction, target, source in (("out", host, there), ("in", there, host)):
                seconds = _copy_s(target[:blocks], source[:blocks])
                if repeat >= 0:
                    case = {"tokens": count, "repeat": repeat, "direction": direction}
                    rows.append(case | {"ms": seconds * 1e3, "bytes": blocks * shape.block_bytes})
    return rows


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _draw(rng: random.Random, path: SwapPath, tokens: int) -> list[int]:
    """As many blocks of the pool as ``tokens`` tokens need."""
    needed = path.pool.shape.blocks(tokens)
    if not 0 < needed <= path.pool.blocks:
        raise RequestError(f"swap: {tokens} tokens need {needed} blocks; the pool has {path.pool.blocks}")
    return rng.sample(range(path.pool.blocks), needed)


def _copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of one copy, timed as those of a swap path."""
    device = source.device if source.is_cuda else target.device
    job = CopyJob(lambda: target.copy_(source, non_blocking=True), copies=1, bytes=target.nbytes)
    return start(job, device).wait().copy_s
