from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.cps.policies.online import CostCurve

LENGTHS = (128, 300, 700, 1500, 2048)


def truth(tokens: float) -> float:
    return 4e-3 + 8e-6 * tokens + 1e-9 * tokens**2


def taught(count: int = 60, spread: float = 0.0, tokens_scale: float = 1, seconds_scale: float = 1) -> CostCurve:
    """A curve that has seen ``truth`` at mixed lengths."""
    rng, curve = np.random.default_rng(0), CostCurve(memory=40)
    for tokens in rng.integers(128, 2049, count):
        seen = truth(tokens) * rng.lognormal(0, spread)
        curve.learn(int(tokens * tokens_scale), seen * seconds_scale, old=False)
    return curve


def test_it_learns_the_curve_through_noise() -> None:
    assert [taught().predict(n) for n in LENGTHS] == pytest.approx([truth(n) for n in LENGTHS], rel=0.03)
    assert [taught(200, 0.1).predict(n) for n in LENGTHS] == pytest.approx([truth(n) for n in LENGTHS], rel=0.2)


def test_units_do_not_matter() -> None:
    base = [taught(spread=0.1).predict(n) for n in LENGTHS]
    wide = taught(spread=0.1, tokens_scale=64, seconds_scale=1e3)
    assert [wide.predict(64 * n) / 1e3 for n in LENGTHS] == pytest.approx(base)


def test_one_observation_reads_as_proportional() -> None:
    curve = CostCurve(memory=40)
    curve.learn(500, 5e-3, old=True)
    assert curve.predict(500) == pytest.approx(5e-3, rel=0.01)
    assert curve.predict(1000) == pytest.approx(10e-3, rel=0.15)


def test_a_stall_is_cut_and_a_change_is_followed_at_the_third() -> None:
    curve = taught(spread=0.05)
    curve.learn(700, 20 * truth(700), old=False)
    assert curve.predict(700) == pytest.approx(truth(700), rel=0.1)
    curve.learn(700, truth(700), old=False)
    for tokens in (300, 1500, 700):
        assert curve.predict(700) < 1.5 * truth(700)
        curve.learn(tokens, 4 * truth(tokens), old=False)
    assert [curve.predict(n) for n in LENGTHS] == pytest.approx([4 * truth(n) for n in LENGTHS], rel=0.15)


def test_fast_is_believed_at_once_where_the_curve_is_old_and_slow_is_not() -> None:
    quick, slow, fresh = taught(), taught(), taught()
    quick.learn(700, truth(700) / 8, old=True)
    slow.learn(700, truth(700) * 8, old=True)
    fresh.learn(700, truth(700) / 8, old=False)
    assert quick.predict(2048) == pytest.approx(truth(2048) / 8, rel=0.1)
    assert slow.predict(2048) == pytest.approx(truth(2048), rel=0.1)
    assert fresh.predict(2048) == pytest.approx(truth(2048), rel=0.1)


def test_a_first_observation_that_was_slow_is_put_right_by_the_second() -> None:
    curve = CostCurve(memory=40)
    curve.learn(700, 20 * truth(700), old=True)
    assert curve.hope(700, idle=0) == pytest.approx(curve.predict(700))
    assert curve.hope(700, idle=200) == pytest.approx(curve.predict(700) / 20, rel=0.1)
    curve.learn(700, truth(700), old=False)
    assert curve.predict(700) == pytest.approx(truth(700), rel=0.25)
    assert curve.hope(700, idle=200) == curve.predict(700)


def test_slowness_that_is_confirmed_leaves_no_hope() -> None:
    curve = taught()
    for _ in range(3):
        curve.learn(700, 50 * truth(700), old=False)
    assert curve.hope(700, idle=100) < curve.predict(700) / 20
    for _ in range(4):
        curve.learn(700, 50 * truth(700), old=False)
    assert curve.hope(700, idle=100) == pytest.approx(curve.predict(700), rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 200_000), st.floats(0, 1e3), st.booleans()), min_size=1, max_size=60))
@settings(max_examples=80, deadline=None)
def test_whatever_it_sees_it_stays_finite_positive_and_increasing(seen: list[tuple[int, float, bool]]) -> None:
    curve = CostCurve(memory=40)
    for tokens, seconds, old in seen:
        curve.learn(tokens, seconds, old)
        here = [curve.predict(n) for n in (1, 10, 1000, 200_000)]
        assert all(0 < cost < np.inf for cost in here) and here == sorted(here)
        assert 0 < curve.hope(1000, idle=7) <= curve.predict(1000)


def test_what_lies_far_from_all_that_was_seen_is_learned_and_no_change() -> None:
    curve = CostCurve(memory=40)
    for tokens in (1500, 1600, 1700, 1800) * 3:
        curve.learn(tokens, truth(tokens), old=False)
    assert curve.predict(16) < truth(16) / 1.5  # a guess, and far off
    for tokens in (16, 24, 32):
        curve.learn(tokens, truth(tokens), old=False)
    assert [curve.predict(n) for n in (16, 32, 1600)] == pytest.approx([truth(n) for n in (16, 32, 1600)], rel=0.05)
