"""Swap paths: bits come back as they went, nothing else changes, and the counts are those of KVShape."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.swap import PATHS, make_path
from firsttoken.engine.swap.block_copier import Move, SwapPath
from firsttoken.engine.swap.coalesced import Overlapped, StagedRows
from firsttoken.engine.swap.host_pool import HostPool, Span
from firsttoken.study.errors import ProfileError, RequestError

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4, dtype=torch.bfloat16, block_tokens=2)

shapes = st.builds(
    KVShape,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    block_tokens=st.integers(1, 5),
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` as bytes: NaNs compare too."""
    return tensor.contiguous().view(torch.uint8).cpu().clone()


def scramble(tensor: torch.Tensor) -> None:
    view = tensor.view(torch.uint8)
    view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8))


def build(name: str, shape: KVShape, device: str, blocks: int = 12, host: int = 16) -> SwapPath:
    """A path between a pool and a host pool of random bits; the first two host rows are somebody else's."""
    pool, host_pool = KVPool(shape, blocks, device), HostPool(shape, host, pinned=device == "cuda")
    scramble(pool.rows)
    scramble(host_pool.all_rows)
    host_pool.allocate(2)
    return make_path(name, pool, host_pool)


@pytest.fixture
def path(request: pytest.FixtureRequest) -> Iterator[SwapPath]:
    built = build(request.param, SHAPE, "cpu")
    yield built
    built.close()


every = pytest.mark.parametrize("path", PATHS, indirect=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PATHS)
@settings(max_examples=25, deadline=None)
@given(shape=shapes, order=st.permutations(range(12)), count=st.integers(1, 6), more=st.integers(0, 6))
def test_a_request_comes_back_to_other_blocks_and_nothing_else_changes(
    name: str, device: str, shape: KVShape, order: list[int], count: int, more: int
) -> None:
    path = build(name, shape, device)
    old, new = order[:count], order[more : more + count]  # apart, overlapping or the same
    span = path.host_pool.allocate(count)
    pool_was, host_was = bits(path.pool.rows), bits(path.host_pool.all_rows)

    moved = path.out(old, span)
    assert torch.equal(bits(path.pool.rows), pool_was)
    host_was[span.start : span.end] = pool_was[old]
    assert torch.equal(bits(path.host_pool.all_rows), host_was)

    scramble(path.pool.rows)
    pool_was = bits(path.pool.rows)
    transfer = path.into(span, new)
    back = transfer.wait()
    assert transfer.done and transfer.wait() == back
    pool_was[new] = host_was[span.start : span.end]
    assert torch.equal(bits(path.pool.rows), pool_was)
    assert torch.equal(bits(path.host_pool.all_rows), host_was)
    path.close()

    tokens = count * shape.block_tokens
    for way in (moved, back):
        assert way.copies == (shape.copies(tokens) if name == "per_block" else 1)
        assert way.bytes == tokens * shape.bytes_per_token == shape.copies(tokens) * shape.copy_bytes
        assert way.prep_s >= 0 and way.copy_s >= 0


@pytest.mark.parametrize("device", DEVICES)
def test_other_blocks_are_written_while_a_request_comes_back(device: str) -> None:
    shape = KVShape(layers=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    path = build("overlapped", shape, device, blocks=64, host=64)
    mine, others = list(range(0, 64, 2)), list(range(1, 64, 2))
    span = path.host_pool.allocate(32)
    wanted = bits(path.host_pool.rows(span))
    transfer = path.into(span, mine)
    for number in range(1, 6):  # a step of the engine writes the blocks of those who run
        path.pool.rows[others] = torch.tensor(number, dtype=shape.dtype, device=device)
    transfer.wait()
    assert torch.equal(bits(path.pool.rows[mine]), wanted)
    assert (path.pool.rows[others] == 5).all()
    path.close()


@pytest.mark.parametrize("device", DEVICES)
def test_transfers_follow_each_other_and_a_swap_out_goes_between(device: str) -> None:
    path = build("overlapped", SHAPE, device)
    spans = [path.host_pool.allocate(count) for count in (2, 3, 4)]
    content = bits(path.host_pool.all_rows)
    first, second = path.into(spans[0], [0, 1]), path.into(spans[1], [2, 3, 4])
    leaving = bits(path.pool.rows[8:12])
    path.out([8, 9, 10, 11], spans[2])
    first.wait(), second.wait()
    assert torch.equal(bits(path.pool.rows[:5]), content[2:7])
    assert torch.equal(bits(path.host_pool.rows(spans[2])), leaving)
    path.close()


def test_into_returns_before_its_transfer_is_done_and_close_waits() -> None:
    path, held = build("overlapped", SHAPE, "cpu"), threading.Event()
    path._worker.submit(held.wait)  # the one worker is busy, so what comes next cannot have moved
    span = path.host_pool.allocate(2)
    wanted = bits(path.host_pool.rows(span))
    transfer = path.into(span, [5, 3])
    assert not transfer.done
    assert not torch.equal(bits(path.pool.rows[[5, 3]]), wanted)
    held.set()
    path.close()
    assert transfer.done
    assert torch.equal(bits(path.pool.rows[[5, 3]]), wanted)


class Broken(Overlapped):
    """A path whose way back fails on the worker."""

    name = "broken"

    def _plan_into(self, blocks: Sequence[int], span: Span) -> tuple[int, Move]:
        def move() -> None:
            raise MemoryError("the worker fails")

        return 1, move


def test_an_error_of_the_worker_is_raised_by_wait() -> None:
    path = Broken(KVPool(SHAPE, 4), HostPool(SHAPE, 4, pinned=False))
    transfer = path.into(path.host_pool.allocate(1), [0])
    with pytest.raises(MemoryError, match="the worker fails"):
        transfer.wait()
    assert transfer.done
    path.close()


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15, deadline=None)
@given(shape=shapes)
def test_rows_staged_on_a_device_are_the_same_rows(device: str, shape: KVShape) -> None:
    """What a GPU does, on a CPU too: a buffer that grows, and serves shorter requests after longer ones."""
    pool, host = KVPool(shape, 12, device), HostPool(shape, 12, pinned=device == "cuda")
    scramble(pool.rows)
    staged = StagedRows(pool.rows, host.all_rows)
    for blocks in ([3], [7, 0, 11], [5, 4], [9, 8, 1, 2, 6]):
        before, span = bits(pool.rows), host.allocate(len(blocks))
        staged.gather(blocks, span)()
        assert torch.equal(bits(host.rows(span)), before[blocks])
        scramble(host.rows(span))
        staged.scatter(span, blocks)()
        before[blocks] = bits(host.rows(span))
        assert torch.equal(bits(pool.rows), before)


@every
def test_works_in_inference_mode(path: SwapPath) -> None:
    span = path.host_pool.allocate(3)
    wanted = bits(path.pool.rows[[6, 2, 4]])
    with torch.inference_mode():
        path.out([6, 2, 4], span)
        path.into(span, [1, 0, 5]).wait()
    assert torch.equal(bits(path.pool.rows[[1, 0, 5]]), wanted)


@every
def test_what_cannot_be_moved_is_refused_and_moves_nothing(path: SwapPath) -> None:
    span, returned = path.host_pool.allocate(3), path.host_pool.allocate(2)
    path.host_pool.release(returned)
    pool_was, host_was = bits(path.pool.rows), bits(path.host_pool.all_rows)
    cases = [
        ([1, 2], span, "2 blocks need a span of as many, not of 3"),
        ([1, 2, 12], span, "block 12 is not in the pool, which has 12"),
        ([1, -1, 2], span, "block -1 is not in the pool"),
        ([1, 2], returned, "are not taken"),
    ]
    for blocks, place, message in cases:
        with pytest.raises(RequestError, match=message):
            path.out(blocks, place)
        with pytest.raises(RequestError, match=message):
            path.into(place, blocks)
    path.close()
    with pytest.raises(RequestError, match=f"the {path.name} path is closed"):
        path.into(span, [0, 1, 2])
    assert torch.equal(bits(path.pool.rows), pool_was)
    assert torch.equal(bits(path.host_pool.all_rows), host_was)


def test_a_name_or_a_host_pool_that_does_not_fit_is_refused() -> None:
    pool, host_pool = KVPool(SHAPE, 4), HostPool(SHAPE, 4, pinned=False)
    with pytest.raises(ProfileError, match=r"no swap path 'coalesed'; known: .* \(did you mean 'coalesced'\?\)"):
        make_path("coalesed", pool, host_pool)
    other = KVShape(layers=2, kv_heads=3, head_dim=8, dtype=torch.bfloat16, block_tokens=2)
    with pytest.raises(RequestError, match="give both one shape"):
        make_path("coalesced", pool, HostPool(other, 4, pinned=False))
