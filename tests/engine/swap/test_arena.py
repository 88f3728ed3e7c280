"""The host pool: no row is lost or given twice, whatever the order of taking and giving back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from firsttoken.engine.kv import KVShape
from firsttoken.engine.swap.host_pool import HostPool, Span
from firsttoken.study.errors import RequestError

SHAPE = KVShape(layers=2, kv_heads=1, head_dim=4, dtype=torch.float32, block_tokens=2)


class Arena(RuleBasedStateMachine):
    """Takes and gives at random, beside a list that says which row belongs to whom."""

    spans = Bundle("spans")

    @initialize(blocks=st.integers(1, 24))
    def build(self, blocks: int) -> None:
        self.host_pool = HostPool(SHAPE, blocks, pinned=False)
        self.owner: list[Span | None] = [None] * blocks

    @rule(target=spans, blocks=st.integers(1, 26))
    def take(self, blocks: int) -> object:
        places = [i for i in range(len(self.owner)) if self.owner[i : i + blocks] == [None] * blocks]
        span = self.host_pool.allocate(blocks)
        if span is None:
            assert not places
            return multiple()
        assert (span.start, span.blocks) == (places[0], blocks)
        self.owner[span.start : span.end] = [span] * blocks
        self.host_pool.rows(span).fill_(span.start + 1)
        return span

    @rule(span=consumes(spans))
    def give(self, span: Span) -> None:
        assert (self.host_pool.rows(span) == span.start + 1).all()  # nobody else has written there
        self.host_pool.release(span)
        self.owner[span.start : span.end] = [None] * span.blocks
        with pytest.raises(RequestError, match="are not taken"):
            self.host_pool.release(span)

    @invariant()
    def holds(self) -> None:
        self.host_pool.check()
        assert self.host_pool.free == self.owner.count(None)
        runs = "".join("." if owner is None else "x" for owner in self.owner).split("x")
        assert self.host_pool.largest == max(map(len, runs))


TestArena = Arena.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_rows_are_a_view_of_memory_that_was_written() -> None:
    host_pool = HostPool(SHAPE, 5, pinned=False)
    assert not host_pool.all_rows.any()
    first, second = host_pool.allocate(2), host_pool.allocate(3)
    assert host_pool.allocate(1) is None and host_pool.largest == 0
    assert host_pool.rows(second).shape == (3, 2, 2, 2, 1, 4)
    host_pool.rows(second).fill_(7)
    assert (host_pool.all_rows[2:] == 7).all() and not host_pool.rows(first).any()


@pytest.mark.parametrize("blocks", [0, -3])
def test_a_pool_or_span_of_nothing_is_refused(blocks: int) -> None:
    with pytest.raises(RequestError, match="at least 1 block of 128 bytes"):
        HostPool(SHAPE, blocks, pinned=False)
    with pytest.raises(RequestError, match=f"at least 1 block, not {blocks}"):
        HostPool(SHAPE, 4, pinned=False).allocate(blocks)


def test_a_span_of_another_place_or_size_is_refused() -> None:
    """What was taken goes back as it was taken; a part of it may be read and written."""
    host_pool = HostPool(SHAPE, 8, pinned=False)
    span = host_pool.allocate(4)
    for other in (Span(0, 3), Span(1, 3), Span(4, 4), Span(3, 2)):
        with pytest.raises(RequestError, match="are not taken"):
            host_pool.release(other)
    for other in (Span(4, 4), Span(3, 2)):
        with pytest.raises(RequestError, match="are not taken"):
            host_pool.rows(other)
    assert len(host_pool.rows(Span(1, 3))) == 3
    host_pool.release(span)
    with pytest.raises(RequestError, match="rows 0 to 4 are not taken"):
        host_pool.rows(span)


def test_memory_that_is_not_there_is_one_clear_line() -> None:
    with pytest.raises(RequestError, match="GiB of memory are not free; ask for fewer blocks"):
        HostPool(SHAPE, 10**12, pinned=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_pinning_without_cuda_is_one_clear_line() -> None:
    with pytest.raises(RequestError, match="needs a CUDA device"):
        HostPool(SHAPE, 4, pinned=True)
