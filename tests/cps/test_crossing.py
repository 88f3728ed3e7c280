from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.cps.crossing import crossing, crossing_interval, fit_crossing
from firsttoken.simulation.costs.published import TABLE_2
from firsttoken.study.errors import CorpusError

TOKENS = [row.tokens for row in TABLE_2]
SWAP = [row.swap_ms for row in TABLE_2]
RECOMPUTE = [row.recompute_ms for row in TABLE_2]


def test_the_published_table_crosses_at_927() -> None:
    found = crossing(TOKENS, SWAP, RECOMPUTE)
    assert found.tokens == pytest.approx(926.6, abs=0.05)
    assert (found.below, found.changes, found.verdict) == ("swap", 1, "swap up to 927 tokens")
    assert crossing(TOKENS, SWAP, RECOMPUTE, log2=True).tokens == pytest.approx(897.5, abs=0.05)


def test_always_is_told_from_always() -> None:
    assert crossing([1, 2, 3], [1, 2, 3], [2, 3, 4]).verdict == "swap always"
    assert crossing([1, 2, 3], [2, 3, 4], [1, 2, 3]).verdict == "recompute always"
    assert crossing([1, 2], [1, 1], [1, 1]).verdict == "swap always"  # a tie, as in the paper's rule
    assert crossing([100, 300], [3, 3], [2, 4]).verdict == "recompute up to 200 tokens"


def test_more_than_one_crossing_is_told() -> None:
    found = crossing([1, 2, 3], [0, 2, 0], [1, 1, 1])
    assert (found.tokens, found.changes) == (1.5, 2)


@given(st.floats(0, 5), st.floats(1e-4, 1e-2), st.floats(0, 5), st.floats(1e-4, 1e-2))
@settings(max_examples=60, deadline=None)
def test_lines_cross_where_they_cross(fixed: float, slope: float, base: float, rise: float) -> None:
    lengths = np.array([128, 512, 1024, 2048, 4096])
    swap, recompute = fixed + slope * lengths + 1e-3, base + rise * lengths + 1e-3
    for found in (crossing(lengths, swap, recompute), fit_crossing(lengths, swap, recompute)):
        if found.tokens is not None:
            assert 128 <= found.tokens <= 4096
            here = [cost + each * found.tokens for cost, each in ((fixed, slope), (base, rise))]
            assert here[0] == pytest.approx(here[1], rel=1e-6, abs=1e-6)


def test_a_fit_is_relative_and_takes_repeated_lengths() -> None:
    lengths = [100, 100, 1000, 1000]
    found = fit_crossing(lengths, [1.0, 1.0, 10.0, 10.0], [3.7, 3.7, 6.4, 6.4])
    assert found.tokens == pytest.approx(3.4 / 0.007, rel=1e-6)
    # one more second at 100 tokens is 27 %, at 1,000 tokens 16 %: the line bends to the first
    near = np.polyval(np.polyfit([100, 550, 1000], [2, 5.5, 10], 1, w=[1 / 2, 1 / 5.5, 1 / 10]), [100, 1000])
    end = fit_crossing([100, 550, 1000], [2, 5.5, 10], [(near.sum()) / 2] * 3)
    assert end.tokens == pytest.approx(550)


class TestInterval:
    LENGTHS = (256, 512, 1024, 2048)

    def seen(self, costs, spread: float, seed: int):
        rng = np.random.default_rng(seed)
        return [(n, costs(n) * rng.lognormal(0, spread)) for n in self.LENGTHS for _ in range(12)]

    def test_it_covers_the_truth(self) -> None:
        swap = self.seen(lambda n: 0.02 * n, 0.1, 1)
        recompute = self.seen(lambda n: 8 + 0.01 * n, 0.1, 2)
        found = crossing_interval(swap, recompute)
        assert found.low < 800 < found.high and found.low < found.crossing.tokens < found.high
        assert (found.without, found.n) == (0, 96)
        assert found == crossing_interval(swap, recompute)

    def test_curves_that_hardly_cross_say_so(self) -> None:
        swap = self.seen(lambda n: 0.02 * n, 0.3, 1)
        near = crossing_interval(swap, self.seen(lambda n: 0.0199 * n, 0.3, 2))
        assert 0 < near.without < 1
        never = crossing_interval(swap, self.seen(lambda n: 0.1 * n, 0.1, 2))
        assert (never.crossing.verdict, never.without, never.low, never.high) == ("swap always", 1, None, None)


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(CorpusError, match="two or more lengths"):
        crossing([512], [1], [2])
    with pytest.raises(CorpusError, match="increasing order"):
        crossing([512, 512], [1, 1], [2, 2])
    with pytest.raises(CorpusError, match=r"not \[512.0\]"):
        fit_crossing([512, 512], [1, 1], [2, 2])
    with pytest.raises(CorpusError, match="same lengths"):
        crossing_interval([(1, 1.0), (2, 2.0)], [(1, 1.0), (3, 2.0)])
