"""A server around a card: the host's time by requests and GPUs, and the prompts of a baseline without a budget."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.sarathi.capacity import Objective
from firsttoken.sarathi.policy import Policy
from firsttoken.simulation.hardware import Hardware
from firsttoken.simulation.stack import STACKS, Stack
from firsttoken.study.errors import ProfileError
from firsttoken_studies.nb41_serving_capacity.bench import Bench, CapacityConfig
from firsttoken_studies.nb46_on_the_stated_gpus.card_capacity import CardCase


@dataclass
class Constant(Costs):
    """Every step takes 10 ms."""

    def step_s(self, prefills, contexts):
        return 0.01 if prefills or contexts else 0.0

    swap_out_s = swap_in_s = None


def test_the_host_takes_what_was_measured_and_lines_between():
    stack = Stack.named("sarathi-2024")
    one, two = (stack.around(Constant(), gpus) for gpus in (1, 2))
    assert one.step_s([], [9] * 32) == pytest.approx(0.01 + 2.407e-3)
    assert one.step_s([(0, 5)], [9] * 23) == pytest.approx(0.01 + (1.850e-3 + 2.407e-3) / 2), "a chunk is a request"
    assert two.step_s([], [9]) == pytest.approx(0.01 + 8.182e-3) and two.step_s([], []) == 0.0
    assert two.decode_steps_s([9, 9], 3) == pytest.approx([0.01 + 8.182e-3] * 3)
    assert Stack.named("bare").around(one, 3) is one


def test_what_no_stack_has_is_refused():
    with pytest.raises(ProfileError, match="no stack is called 'orca'; known: bare, sarathi-2024"):
        Stack.named("orca")
    with pytest.raises(ProfileError, match="the host's time of 8 GPUs was not measured; measured: 1, 2, 4"):
        STACKS["sarathi-2024"].around(Constant(), 8)


def test_a_case_may_name_its_stack():
    bare, hosted = (CardCase.named(f"mistral-7b 1 a100-sxm 100{stack}") for stack in ("", " sarathi-2024"))
    assert str(bare) == "mistral-7b on 1 a100-sxm, 100 ms" and str(hosted) == f"{bare}, sarathi-2024"
    with pytest.raises(ProfileError, match="no stack is called 'a b'"):
        Stack.named(CardCase.named("mistral-7b 1 a100-sxm 100 a b").stack)


@pytest.mark.parametrize(("stack", "most"), [("bare", 2048), ("sarathi-2024", 8192)])
def test_the_baseline_puts_as_many_prompts_into_a_step_as_its_stack_has(stack, most):
    config = CapacityConfig("sharegpt", 60, 1, 64, 1.0, (), (), (), 1.0, stack=stack)
    bench = Bench(config, Hardware("a100-sxm", 32, 1024, model="mistral-7b"), extended=True)
    _, trace = bench.run(Policy.named("prefill_first"), Objective(0.1), seed=0, rate=1000.0)
    steps = [[new for _, new in step.prefills] for step in trace.steps]
    assert max(sum(step) for step in steps if len(step) > 1) in range(3 * most // 4, most + 1)
