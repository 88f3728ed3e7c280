"""The batch times of Sarathi-Serve's artifact, at the points that it published and between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.engine.costs.cost_model import line_through
from firsttoken.simulation.costs.sarathi_artifact import DECODE_MS_PER_TOKEN, PREFILL_MS_PER_TOKEN, BatchCosts
from firsttoken.study.errors import ProfileError

COSTS = BatchCosts()


@pytest.mark.parametrize("tokens", PREFILL_MS_PER_TOKEN)
def test_a_prefill_alone_takes_what_was_published(tokens: int) -> None:
    assert COSTS.step_s([(0, tokens)], []) == pytest.approx(tokens * PREFILL_MS_PER_TOKEN[tokens] / 1e3)


@pytest.mark.parametrize("count", [count for count in DECODE_MS_PER_TOKEN])
def test_decodes_alone_take_what_was_published(count: int) -> None:
    assert COSTS.step_s([], [500] * count) == pytest.approx(count * DECODE_MS_PER_TOKEN[count] / 1e3, rel=0.03)


def test_a_mixed_batch_is_as_the_artifacts_table_2_has_it() -> None:
    """1,021 prompt tokens and 3 decodes: 217.6 ms there; the costs are of figure 2, where decodes were quicker."""
    assert COSTS.step_s([(0, 1021)], [500] * 3) == pytest.approx(0.2176, rel=0.25)


def test_a_prompt_in_pieces_costs_no_less_than_whole() -> None:
    whole = COSTS.step_s([(0, 4096)], [])
    pieces = sum(COSTS.step_s([(start, 1024)], []) for start in range(0, 4096, 1024))
    assert whole <= pieces <= 1.3 * whole
    assert COSTS.step_s([], []) == 0


def test_no_swap_was_published() -> None:
    with pytest.raises(ProfileError, match="holds no price of a swap; preempt by recompute"):
        COSTS.swap_s(10)


@given(st.dictionaries(st.integers(0, 60), st.floats(0, 1e3), min_size=1), st.integers(0, 80))
def test_lines_between_points_are_numpys(points: dict[int, float], most: int) -> None:
    points = dict(sorted(points.items()))
    inside = min(most, max(points)) + 1
    line = line_through(points, most)
    assert len(line) == most + 1
    assert line[:inside] == pytest.approx(np.interp(range(inside), list(points), list(points.values())), abs=1e-12)
