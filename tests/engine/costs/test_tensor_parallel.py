"""A model over several GPUs: what they exchange is added, and a number nobody profiled is scaled to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from firsttoken.assets.dense_shape import SHAPES
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import OperatorTables
from firsttoken.simulation.costs.tensor_parallel import ExchangingCosts, ScaledProfile
from firsttoken.study.errors import ProfileError

SHAPE = SHAPES["llama-3.1-8b"]
STEPS = (([], [512] * 16), ([(0, 700)], []), ([(1024, 512)], [300] * 8))


@dataclass
class Constant(Costs):
    """Every step takes a second, every swap two."""

    def step_s(self, prefills, contexts):
        return 1.0

    def swap_out_s(self, tokens):
        return 2.0

    swap_in_s = swap_out_s


@pytest.fixture(scope="module")
def tables():
    return OperatorTables.read("h100-sxm")


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_two_all_reduces_a_layer_are_added(tables, gpus):
    costs = ExchangingCosts.of(Constant(), tables, SHAPE, gpus)
    sizes, seconds = tables.all_reduce(gpus)
    place = 10
    tokens = int(sizes[place] / (2 * SHAPE.hidden))
    assert tokens * 2 * SHAPE.hidden == sizes[place], "a size that was measured, and needs no line"
    exchanged = costs.step_s([(0, tokens)], []) - 1.0
    assert exchanged == pytest.approx(2 * SHAPE.layers * seconds[place])
    assert costs.step_s([], []) == 1.0
    assert costs.swap_out_s(1) == costs.swap_in_s(1) == 2.0


def test_more_tokens_take_longer_beyond_every_table(tables):
    costs = ExchangingCosts.of(Constant(), tables, SHAPE, 2)
    times = [costs.step_s([(0, 1 << power)], []) for power in range(3, 18)]
    assert times == sorted(times)


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_a_ring_sends_twice_all_but_one_share(gpus):
    costs = ExchangingCosts.over_link(Constant(), SHAPE, gpus, bytes_s=1e9, latency_s=1e-5)
    bytes_ = 1000 * SHAPE.hidden * 2
    once = 2 * (gpus - 1) / gpus * bytes_ / 1e9 + 2 * (gpus - 1) * 1e-5
    assert costs.step_s([(0, 600)], [9] * 400) - 1.0 == pytest.approx(2 * SHAPE.layers * once)


@pytest.mark.parametrize("gpus", [0, 1])
def test_one_gpu_exchanges_nothing(tables, gpus):
    with pytest.raises(ProfileError, match=rf"{gpus} GPUs exchange nothing; take the profile as it is, or at least 2"):
        ExchangingCosts.of(Constant(), tables, SHAPE, gpus)


def test_a_number_of_gpus_that_was_not_measured_is_refused(tables):
    with pytest.raises(ProfileError, match=r"h100-sxm has no all-reduce of 3 GPUs; measured: 2, 4, 8"):
        ExchangingCosts.of(Constant(), tables, SHAPE, 3)


@pytest.mark.parametrize(("gpus", "rate", "latency"), [(1, 1e9, 0.0), (2, 0.0, 0.0), (2, 1e9, -1e-6)])
def test_a_ring_without_a_link_is_refused(gpus, rate, latency):
    with pytest.raises(ProfileError, match=r"a ring has at least 2 GPUs, links above 0 bytes a second"):
        ExchangingCosts.over_link(Constant(), SHAPE, gpus, rate, latency)


@pytest.mark.parametrize("step", STEPS)
def test_operators_scaled_by_themselves_are_the_split_operators(tables, step):
    alone, split = (OperatorCosts.of(tables, SHAPE, gpus) for gpus in (1, 4))
    assert ScaledProfile(alone, alone, split).step_s(*step) == pytest.approx(split.step_s(*step))
    assert ScaledProfile(Constant(), alone, split).step_s(*step) == pytest.approx(
        split.step_s(*step) / alone.step_s(*step)
    )


def test_nothing_scales_to_nothing(tables):
    alone = OperatorCosts.of(tables, SHAPE)
    costs = ScaledProfile(Constant(), alone, alone)
    assert costs.step_s([], []) == 0
    assert costs.swap_out_s(100) == alone.swap_out_s(100) and costs.swap_in_s(100) == alone.swap_in_s(100)


def test_operators_of_another_shape_or_number_are_refused(tables):
    split = OperatorCosts.of(tables, SHAPE, 2)
    other = OperatorCosts.of(tables, SHAPES["mistral-7b"])
    for wrong in ((split, split), (other, split)):
        with pytest.raises(ProfileError, match=r"scaled costs: the operators must be of one shape, alone on 1 GPU"):
            ScaledProfile(Constant(), *wrong)
