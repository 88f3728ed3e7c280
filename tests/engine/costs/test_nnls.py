from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.costs.fitted import non_negative


@given(st.integers(0, 10_000), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_it_agrees_with_scipy(seed: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(12, columns)) * 10.0 ** rng.integers(-4, 5, columns)
    target = rng.normal(size=12) * 10.0 ** rng.integers(-9, 3)
    mine = non_negative(matrix, target)
    theirs, least = scipy.optimize.nnls(matrix, target)
    assert (mine >= 0).all()
    assert np.linalg.norm(matrix @ mine - target) == pytest.approx(least, rel=1e-7)
    assert matrix @ mine == pytest.approx(matrix @ theirs, abs=1e-6 * np.linalg.norm(target))


def test_columns_and_targets_of_zeros() -> None:
    assert non_negative(np.array([[0.0, 1.0], [0.0, 2.0]]), np.array([2.0, 4.0])).tolist() == [0, 2]
    assert non_negative(np.eye(2), np.zeros(2)).tolist() == [0, 0]
    assert non_negative(np.eye(2), -np.ones(2)).tolist() == [0, 0]
