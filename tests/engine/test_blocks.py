"""The block pool: no block is lost or has owners that do not know of it, whatever the order of taking and giving."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from firsttoken.engine.block_pool import BlockPool
from firsttoken.study.errors import RequestError


class Pool(RuleBasedStateMachine):
    """Takes, shares, publishes and gives at random, beside a count of owners and a list of what may be found."""

    owners = Bundle("owners")

    @initialize(count=st.integers(1, 20), share=st.floats(0, 0.99))
    def build(self, count: int, share: float) -> None:
        self.pool = BlockPool(count, watermark=int(count * share))
        self.out: Counter[int] = Counter()
        self.kept: list[bytes] = []  # keys that may be found, as far as is known
        self.idle: list[bytes] = []  # those whose blocks nobody has, in the order in which they go

    @rule(
        target=owners, wanted=st.integers(0, 21), admission=st.booleans(), shares=st.integers(0, 3), seed=st.randoms()
    )
    def take(self, wanted: int, admission: bool, shares: int, seed: random.Random) -> object:
        keys = seed.sample(self.kept, min(shares, len(self.kept)))
        found = [self.pool.find([key])[0] for key in keys]
        left = self.pool.free - sum(not self.out[block] for block in found)
        left -= self.pool.watermark if admission else 0
        blank = self.pool.free - len(self.idle)
        blocks = self.pool.allocate(wanted, admission=admission, shared=found)
        if blocks is None:
            assert wanted > left
            return multiple()
        fresh = blocks[len(found) :]
        assert wanted <= left and len(fresh) == len(set(fresh)) == wanted and blocks[: len(found)] == found
        assert not +self.out & Counter(fresh) and set(fresh) <= set(range(self.pool.count))
        self.idle = [key for key in self.idle if key not in keys]
        for key in self.idle[: max(0, wanted - blank)]:  # the longest away were evicted
            assert self.pool.find([key]) == []
            self.kept.remove(key)
        self.idle = self.idle[max(0, wanted - blank) :]
        self.out += Counter(blocks)
        return blocks

    @rule(blocks=owners, key=st.binary(min_size=1, max_size=1))
    def publish(self, blocks: list[int], key: bytes) -> None:
        unknown = [block for block in blocks if not any(self.pool.find([known]) == [block] for known in self.kept)]
        if unknown:
            self.pool.publish(unknown[0], key)
            self.kept += [] if key in self.kept else [key]

    @rule(blocks=owners)
    def withdraw(self, blocks: list[int]) -> None:
        self.kept = [key for key in self.kept if self.pool.find([key])[0] not in blocks]
        self.pool.withdraw(blocks)

    @rule(blocks=consumes(owners), first_out=st.booleans())
    def give(self, blocks: list[int], first_out: bool) -> None:
        self.pool.release(blocks, first_out=first_out)
        self.out -= Counter(blocks)
        held = {self.pool.find([key])[0]: key for key in self.kept}
        given = [held[block] for block in reversed(blocks) if block in held and not self.out[block]]
        self.idle = given + self.idle if first_out else self.idle + given
        if gone := [block for block in blocks if not self.out[block]]:
            with pytest.raises(RequestError, match="nobody has it"):
                self.pool.release(gone)

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        assert self.pool.free == self.pool.count - len(self.out)
        assert all(self.pool.owners(block) == self.out[block] for block in range(self.pool.count))
        assert all(len(self.pool.find([key])) == 1 for key in self.kept) and set(self.idle) <= set(self.kept)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_blocks_that_are_given_back_are_the_next_to_go_out() -> None:
    """They are warm in the cache; and a simulation takes the same ones as a live run."""
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [[7], [-1], [5], [0, 0], [1, 5, 0]])
def test_a_wrong_block_is_named_and_nothing_is_lost(wrong: list[int]) -> None:
    pool = BlockPool(6)
    pool.allocate(2)
    with pytest.raises(RequestError, match=r"block -?\d was given back, but nobody has it"):
        pool.release(wrong)
    pool.check()


@pytest.mark.parametrize(("count", "watermark"), [(0, 0), (-2, 0), (4, 4), (4, -1)])
def test_a_pool_that_could_give_nothing_is_refused(count: int, watermark: int) -> None:
    with pytest.raises(RequestError, match="keep at least one to give out"):
        BlockPool(count, watermark)


def test_what_was_given_back_first_is_forgotten_first() -> None:
    """And of one request the end, as who begins alike may still share what comes before."""
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for block in (*first, *second):
        pool.publish(block, bytes([block]))
    pool.release(first)
    pool.release(second)
    keys = [bytes([block]) for block in range(4)]
    assert pool.free == 4 and pool.find(keys) == [0, 1, 2, 3]
    assert pool.allocate(1) == [1] and pool.find(keys) == [0] and pool.find(keys[2:]) == [2, 3]
    assert pool.allocate(2, shared=[2]) == [2, 0, 3] and pool.find([keys[2]]) == [2]
    assert pool.allocate(1, shared=[2]) is None and pool.allocate(0, shared=[2]) == [2] and pool.owners(2) == 2
