"""Measured points are met, a power law is followed exactly, and nothing is guessed below the first point."""

import numpy as np
import pytest

from firsttoken.simulation.costs.operator_tables import power_between


def test_points_powers_and_both_ends():
    at = np.array([2.0, 8.0, 64.0])
    curve = at, 3 * at**1.5
    assert power_between(at, curve) == pytest.approx(curve[1])
    assert power_between(np.array([4.0, 30.0]), curve) == pytest.approx(3 * np.array([4.0, 30.0]) ** 1.5)
    assert power_between(np.array([1.0, 0.5]), curve) == pytest.approx([curve[1][0]] * 2)
    assert power_between(np.array([128.0]), curve) == pytest.approx(2 * curve[1][-1])
