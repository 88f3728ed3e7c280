"""However requests share the pool, each says what it says alone: the greedy tokens of plain ``generate``."""

from __future__ import annotations

from collections import Counter

import pytest
from plain_tokens import generated
from schedules import draw_schedule, perform

from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.swap.block_copier import CopyTimes

pytestmark = [pytest.mark.long(seconds=100), pytest.mark.usefixtures("in_pieces")]
ANSWER = 24


@pytest.mark.parametrize(
    ("kind", "arrivals", "examples"),
    [("fused", False, 240), ("fused", True, 160), ("llama", False, 120), ("llama", True, 80)],
)
def test_every_schedule_gives_the_plain_tokens(
    lab, kind: str, arrivals: bool, examples: int, request: pytest.FixtureRequest
) -> None:
    """With the kernels between fused layers, and with stock modules and attention."""
    subject, seen = request.getfixturevalue(kind), Counter()
    for seed in range(examples):
        seen.update(perform(lab, subject, draw_schedule(seed, len(subject.known), arrivals)))
    for what in ("swap: policy", "recompute: policy", "recompute: host pool full", "mixed", "shared"):
        assert seen[what] >= examples // 50, f"the schedules are too tame: {seen}"


@pytest.mark.parametrize("kind", ["qwen2", "lora", "gemma3"])
def test_models_with_biases_an_adapter_or_windows_too(lab, kind: str, request: pytest.FixtureRequest) -> None:
    subject, seen = request.getfixturevalue(kind), Counter()
    for seed in range(40):
        seen.update(perform(lab, subject, draw_schedule(seed, len(subject.known), arrivals=False)))
    assert seen["swap: policy"] and seen["recompute: policy"]


class Forgetful(LiveExecutor):
    """Loses what waits on the host, all of it or the last ``lost`` blocks."""

    lost = 0

    def swap_out(self, request: Request) -> CopyTimes | None:
        moved = super().swap_out(request)
        if moved is not None:
            self.host_pool.rows(request.host)[-self.lost :] = 0
        return moved


class LosesOneBlock(Forgetful):
    lost = 1


def under_pressure(lab, subject, **options):
    """Six long requests in a pool for little more than one; which of them were swapped, and which came out wrong."""
    run = lab.live(subject.model, 20, host_blocks=200, preemption="swap", **options)
    known = subject.known[-6:]
    for one in known:
        run.submit(one.prompt, Sampling(ANSWER), 0.0)
    outputs = run.finish()
    swapped = {recovery.request for recovery in run.trace.recoveries}
    return swapped, {i for i, (one, said) in enumerate(zip(known, outputs, strict=True)) if said != list(one.answer)}


def test_these_models_notice_a_spoilt_copy(lab, llama) -> None:
    """The control of all the tests above: equal tokens mean something only if a wrong cache changes them."""
    swapped, wrong = under_pressure(lab, llama)
    assert len(swapped) >= 3 and not wrong
    swapped, wrong = under_pressure(lab, llama, kind=Forgetful)
    assert len(swapped) >= 3 and wrong == swapped
    swapped, wrong = under_pressure(lab, llama, kind=LosesOneBlock)
    assert wrong and wrong <= swapped


def test_other_decoders_too(lab, family) -> None:
    swapped, wrong = under_pressure(lab, family)
    assert swapped and not wrong
    swapped, wrong = under_pressure(lab, family, kind=Forgetful)
    assert wrong == swapped


def test_the_model_is_left_as_it_was(lab, llama) -> None:
    under_pressure(lab, llama)
    lab.close()
    assert llama.model.config._attn_implementation == "sdpa"
    one = llama.known[-1]
    for stop in (None, one.answer[7]):  # and `Known.expected` cuts where `generate` does
        said = generated(llama.model, one.prompt, ANSWER, eos_token_id=stop)
        assert said.tokens == one.expected(Sampling(ANSWER, stop=() if stop is None else (stop,)))
