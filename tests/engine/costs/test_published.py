from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.simulation.costs.published import (
    PAPER_SHAPE,
    PREFILL_FIXED_S,
    TABLE_2,
    PublishedCosts,
    decomposed,
)
from firsttoken.study.errors import ProfileError

COSTS = PublishedCosts(decode_s=0.03)
LENGTHS = st.integers(1, 20_000)


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: str(row.tokens))
def test_the_table_comes_back(row) -> None:
    assert COSTS.swap_out_s(row.tokens) * 1e3 == pytest.approx(row.out_ms)
    assert COSTS.swap_in_s(row.tokens) * 1e3 == pytest.approx(row.prep_ms + row.in_ms)
    assert COSTS.recompute_s(row.tokens) * 1e3 == pytest.approx(row.recompute_ms)
    assert COSTS.swap_s(row.tokens) * 1e3 == pytest.approx(row.swap_ms, abs=0.03)  # totals are rounded in the paper


def test_between_below_and_above_the_points() -> None:
    assert COSTS.recompute_s(768) == pytest.approx((8.3e-3 + 12.3e-3) / 2)
    assert COSTS.swap_out_s(256) == pytest.approx(3.236e-3 / 2)
    assert COSTS.recompute_s(256) == pytest.approx((PREFILL_FIXED_S + 8.3e-3) / 2)
    assert pytest.approx(4.3e-3) == PREFILL_FIXED_S
    assert COSTS.recompute_s(12_288) == pytest.approx(97.6e-3 + (97.6e-3 - 42.9e-3))
    assert COSTS.swap_out_s(12_288) == pytest.approx(68.939e-3 + (68.939e-3 - 34.632e-3))


@given(LENGTHS, LENGTHS)
@settings(max_examples=50, deadline=None)
def test_more_tokens_cost_more(one: int, other: int) -> None:
    less, more = sorted((one, other))
    for cost in (COSTS.swap_out_s, COSTS.swap_in_s, COSTS.recompute_s):
        assert 0 < cost(less) <= cost(more)


@given(st.lists(st.tuples(st.integers(0, 4096), st.integers(1, 2048)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_a_batch_pays_the_fixed_part_once(prefills: list[tuple[int, int]]) -> None:
    alone = sum(COSTS.step_s([prefill], []) for prefill in prefills)
    assert COSTS.step_s(prefills, []) == pytest.approx(alone - (len(prefills) - 1) * PREFILL_FIXED_S)


def test_chunks_cost_the_whole_and_a_fixed_part_each() -> None:
    chunks = [COSTS.step_s([(done, 512)], []) for done in range(0, 2048, 512)]
    assert sum(chunks) == pytest.approx(COSTS.recompute_s(2048) + 3 * PREFILL_FIXED_S)


def test_steps_that_decode() -> None:
    assert COSTS.step_s([], []) == 0
    assert COSTS.step_s([], [100, 2000]) == pytest.approx(0.03)
    # one pass: the larger fixed part, here that of the decode
    assert COSTS.step_s([(0, 512)], [100]) == pytest.approx(0.03 + 8.3e-3 - PREFILL_FIXED_S)
    with pytest.raises(ProfileError, match="decode_s must be 0 or more"):
        PublishedCosts(decode_s=-1)


def test_the_paper_s_link_arithmetic() -> None:
    assert (PAPER_SHAPE.bytes_per_token, PAPER_SHAPE.copy_bytes, PAPER_SHAPE.copies(1024)) == (12_288, 4096, 3072)
    parts = decomposed(1024)
    assert parts.wire_s == pytest.approx(1024 * 12_288 / 25e9)
    assert parts.wire_s + parts.copies * parts.out_us_per_copy / 1e6 == pytest.approx(6.257e-3)
    assert parts.wire_s + parts.copies * parts.in_us_per_copy / 1e6 == pytest.approx(6.379e-3)
    # claims cps.derived.swap_effective_bw: 2 to 3 us a copy, bytes included
    assert all(1.7 < decomposed(row.tokens).out_us_per_copy < 3.0 for row in TABLE_2)
    with pytest.raises(ProfileError, match="raise the rate"):
        decomposed(1024, bytes_per_s=1e9)
