"""The block pool: no block is lost or has two owners, whatever the order of taking and giving back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from firsttoken.engine.blocks import BlockPool
from firsttoken.study.errors import RequestError


class Pool(RuleBasedStateMachine):
    """Takes and gives at random, beside a set of what is out."""

    owners = Bundle("owners")

    @initialize(count=st.integers(1, 20), share=st.floats(0, 0.99))
    def build(self, count: int, share: float) -> None:
        self.pool = BlockPool(count, watermark=int(count * share))
        self.out: set[int] = set()

    @rule(target=owners, wanted=st.integers(0, 21), admission=st.booleans())
    def take(self, wanted: int, admission: bool) -> object:
        left = self.pool.count - len(self.out) - (self.pool.watermark if admission else 0)
        blocks = self.pool.take(wanted, admission=admission)
        if blocks is None:
            assert wanted > left
            return multiple()
        assert wanted <= left and len(blocks) == len(set(blocks)) == wanted
        assert not self.out & set(blocks) and set(blocks) <= set(range(self.pool.count))
        self.out |= set(blocks)
        return blocks

    @rule(blocks=consumes(owners))
    def give(self, blocks: list[int]) -> None:
        self.pool.give(blocks)
        self.out -= set(blocks)
        if blocks:
            with pytest.raises(RequestError, match="nobody has it"):
                self.pool.give(blocks)

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        assert self.pool.free == self.pool.count - len(self.out)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_blocks_that_are_given_back_are_the_next_to_go_out() -> None:
    """They are warm in the cache; and a simulation takes the same ones as a live run."""
    pool = BlockPool(6)
    first, second = pool.take(2), pool.take(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    pool.give(second)
    pool.give(first)
    assert pool.take(4) == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [[7], [-1], [5], [0, 0], [1, 5, 0]])
def test_a_wrong_block_is_named_and_nothing_is_lost(wrong: list[int]) -> None:
    pool = BlockPool(6)
    pool.take(2)
    with pytest.raises(RequestError, match=r"block -?\d was given back, but nobody has it"):
        pool.give(wrong)
    pool.check()


def test_the_watermark_binds_admission_only() -> None:
    pool = BlockPool(10, watermark=3)
    assert pool.take(8, admission=True) is None and pool.free == 10
    assert len(pool.take(7, admission=True)) == 7
    assert pool.take(1, admission=True) is None
    assert len(pool.take(3)) == 3
    assert pool.take(0) == [] and pool.take(1) is None


@pytest.mark.parametrize(("count", "watermark"), [(0, 0), (-2, 0), (4, 4), (4, -1)])
def test_a_pool_that_could_give_nothing_is_refused(count: int, watermark: int) -> None:
    with pytest.raises(RequestError, match="keep at least one to give out"):
        BlockPool(count, watermark)
