"""The step loop: requests that are cancelled wherever they stand, what it refuses, and how a preemption is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, FalconConfig, Gemma2Config, MistralConfig, Qwen2Config

from firsttoken.cps.policies import make_policy
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.request import Phase, Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.swap.block_copier import CopyTimes, Movement
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import ModelError, ProfileError, RequestError

ANSWER = Sampling(24)


# -- cancelling


class Late(Movement):
    """A transfer that nobody knows to have arrived until they wait for it."""

    done: ClassVar[bool] = False

    def __init__(self, transfer: Movement) -> None:
        self._transfer = transfer

    def wait(self) -> CopyTimes:
        return self._transfer.wait()


class SlowLink(LiveExecutor):
    """Every way back is still under way when the next step is planned."""

    def swap_in(self, request: Request) -> Movement:
        return Late(super().swap_in(request))


def crowd(lab, subject, blocks: int = 26, **options):
    """Five long requests at once, in a pool for little more than one."""
    options = {"host_blocks": 200, "preemption": "swap", "swap": "overlapped"} | options
    run = lab.live(subject.model, blocks, **options)
    for one in subject.known[-5:]:
        run.submit(one.prompt, ANSWER, 0.0)
    return run


def check_others(run, subject, gone: set[int]) -> None:
    """Step to the end; everybody else says what they say alone, and what was cancelled is the beginning of it."""
    outputs = run.finish()
    for number, (one, output) in enumerate(zip(subject.known[-5:], outputs, strict=True)):
        expected = list(one.answer)
        assert output == (expected[: len(output)] if number in gone else expected)


def coming(run) -> Request:
    request = run.submit([1, 2, 3], ANSWER, run.engine.executor.now() + 3600)
    run.step()
    return request


def standing(phase: Phase) -> Callable[..., Request]:
    def find(run) -> Request:
        found: list[Request] = []
        run.until(lambda: found.extend(r for r in run.requests if r.phase is phase and r.times_s) or found)
        return found[0]

    return find


def waiting(run) -> Request:
    run.step()
    return next(request for request in run.requests if request.phase is Phase.WAITING)


@pytest.mark.parametrize(
    "find",
    [coming, waiting, standing(Phase.RUNNING), standing(Phase.SWAPPED), standing(Phase.RESTORING)],
    ids=["coming", "waiting", "running", "swapped", "restoring"],
)
def test_one_may_be_cancelled_wherever_it_stands(lab, llama, find) -> None:
    run = crowd(lab, llama, kind=SlowLink)
    request = find(run)
    held = run.engine.pool.free + len(request.blocks)
    run.engine.cancel(request)
    assert request.finished and run.engine.pool.free == held
    assert request.host is None and request.transfer is None
    run.audit()
    run.engine.cancel(request)  # again does nothing
    said = request.output
    if request.number == 5:
        run.requests.remove(request)
    check_others(run, llama, {request.number})
    assert request.output == said
    run.engine.cancel(run.requests[0])  # nor after the end
    run.all_back()


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_any_may_be_cancelled_at_any_time(lab, llama, policy: str) -> None:
    @settings(settings.get_profile("live"), max_examples=25)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = random.Random(seed)
        kind = rng.choice((LiveExecutor, SlowLink))
        run = crowd(lab, llama, preemption=policy, kind=kind, scheduler=rng.choice((*SCHEDULERS, "prefill_first")))
        gone: set[int] = set()
        while run.engine.busy:
            run.step()
            if rng.random() < 0.1:
                request = rng.choice(run.requests)
                gone |= set() if request.finished else {request.number}
                run.engine.cancel(request)
                run.audit()
        check_others(run, llama, gone)

    check()


class BrokenLink(SlowLink):
    """A way back that fails when somebody waits for it."""

    def swap_in(self, request: Request) -> Movement:
        transfer = super().swap_in(request)
        transfer.wait()

        def fail() -> CopyTimes:
            raise RuntimeError("the link is down")

        transfer.wait = fail
        return transfer


def test_a_request_whose_way_back_failed_can_still_be_cancelled(lab, llama) -> None:
    run = crowd(lab, llama, kind=BrokenLink)
    with pytest.raises(RuntimeError, match="the link is down"):
        run.engine.run()
    for request in run.requests:
        run.engine.cancel(request)
    run.all_back()
    again = run.submit(llama.known[3].prompt, ANSWER)
    run.finish()
    assert again.output == list(llama.known[3].answer)


# -- what is refused


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        (
            [1] * 30,
            {"max_tokens": 20},
            "a prompt of 30 tokens and 20 new ones exceed the KV pool of 48 tokens; ask for",
        ),
        ([1] * 500, {"max_tokens": 13}, "a prompt of 500 tokens and 13 new ones exceed the model's context of 512 tok"),
        ([1, 256], {}, "the prompt holds a token outside the vocabulary of 256"),
        ([1, -1, 3], {}, "the prompt holds a token outside the vocabulary of 256"),
        ([1, 2.0], {}, "the prompt holds something that is no token id: 'float'"),
        ("abc", {}, "the prompt holds something that is no token id: 'str'"),
        ([1], {"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ([1], {"max_tokens": -4}, "max_tokens must be at least 1, not -4"),
        ([1], {"temperature": -0.1}, r"temperature must be 0 \(greedy\) or a positive number, not -0.1"),
        ([1], {"temperature": float("inf")}, "or a positive number, not inf"),
        ([1], {"temperature": float("nan")}, "or a positive number, not nan"),
        ([1], {"temperature": 10**400}, "or a positive number, not 1000"),
        ([1], {"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ([1], {"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01"),
        ([1], {"top_p": float("nan")}, "top_p must be above 0 and at most 1, not nan"),
        ([1], {"seed": 1 << 64}, "seed must have at most 64 bits, not 18446744073709551616"),
    ],
)
def test_a_request_that_can_never_run_is_refused(lab, llama, prompt, sampling: dict, message: str) -> None:
    run = lab.live(llama.model, 13, watermark=0.1)
    with pytest.raises(RequestError, match=message):
        run.submit(prompt, Sampling(**sampling))
    assert not run.engine.busy
    request = run.submit(llama.known[2].prompt, ANSWER)
    assert run.finish() == [list(llama.known[2].answer)]
    assert request.number == 0


def test_the_largest_request_that_fits_runs(lab, llama) -> None:
    """Keys and values of the last token are never needed."""
    one = llama.known[-1]  # 40 tokens
    run = lab.live(llama.model, 16, block_tokens=4)
    run.submit(one.prompt, Sampling(24))
    with pytest.raises(RequestError, match="exceed the KV pool of 64 tokens"):
        run.submit([*one.prompt, 0, 0], Sampling(24))
    run.finish()
    run = lab.simulated(1000, context=64)
    run.submit([0] * 40, Sampling(24))
    with pytest.raises(RequestError, match="exceed the model's context of 64 tokens; ask for fewer"):
        run.submit([0] * 41, Sampling(24))
    run.finish()


def test_token_ids_of_any_integer_kind_are_taken(lab, llama) -> None:
    one = llama.known[5]
    run = lab.live(llama.model, 50)
    for prompt in (np.array(one.prompt), torch.tensor(one.prompt), tuple(one.prompt)):
        run.submit(prompt, ANSWER)
    assert run.finish() == [list(one.answer)] * 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"scheduler": "prefil_first"}, "no scheduler 'prefil_first'; known: * (did you mean 'prefill_first'?)"),
        ({"scheduler": "xyz"}, "no scheduler 'xyz'; known: *request_level"),
        ({"victim": "last_arived"}, "no victim choice 'last_arived'; known: * (did you mean 'last_arrived'?)"),
        ({"preemption": "swop"}, "no preemption policy 'swop'; known: * (did you mean 'swap'?)"),
        ({"watermark": 1.0}, "watermark must be a share from 0 to below 1, not 1.0"),
        ({"watermark": -0.1}, "watermark must be a share from 0 to below 1, not -0.1"),
        ({"requests": 0}, "requests must be at least 1, not 0"),
        ({"prefill_tokens": 0}, "prefill_tokens must be at least 1, not 0"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(lab, config: dict, message: str) -> None:
    with pytest.raises(ProfileError) as told:
        lab.simulated(10, **config)
    assert fnmatchcase(str(told.value), f"*{message}*")


def test_a_pool_that_cannot_be_leaves_the_model_as_it_was(lab, llama) -> None:
    lab.close()
    with pytest.raises(RequestError, match="host pool: it needs room for at least 1 block"):
        LiveExecutor(llama.model, 10, host_blocks=-1)
    assert llama.model.config._attn_implementation == "sdpa"


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        Gemma2Config(**SMALL, head_dim=8, sliding_window=16),
        MistralConfig(**SMALL, sliding_window=16),  # has no list of layer types
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_with_a_sliding_window_is_refused(config) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="has layers of sliding_attention; the engine runs full_attention only"):
        LiveExecutor(model, 10)


def test_a_model_that_keeps_its_own_attention_is_refused() -> None:
    """It would run, and each token of a step would see those of all requests."""
    model = AutoModelForCausalLM.from_config(
        FalconConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=64)
    )
    with pytest.raises(ModelError, match="falcon has an attention that cannot read KV blocks"):
        LiveExecutor(model, 10)


def test_one_model_runs_in_one_engine_at_a_time(lab, llama) -> None:
    """The first to close would give the model its own attention back, and the other would go on with it."""
    run = lab.live(llama.model, 50)
    with pytest.raises(ModelError, match="the llama model runs in an engine already; close that one first"):
        LiveExecutor(llama.model, 10)
    with pytest.raises(ModelError, match="was called without an engine's step: close the engine to use the model"):
        llama.model(torch.tensor([[1, 2, 3]]))
    request = run.submit(llama.known[0].prompt, ANSWER)
    run.step()
    lab.close()
    with pytest.raises(ModelError, match="the engine was closed, or the model's attention was changed"):
        run.step()
    run.engine.cancel(request)
    run = lab.live(llama.model, 50)
    run.submit(llama.known[0].prompt, ANSWER)
    assert run.finish() == [list(llama.known[0].answer)]


# -- who decides, and why


def test_a_host_pool_that_is_full_makes_it_recompute(lab, llama) -> None:
    reasons = {}
    for host_blocks in (0, 12, 200):
        run = crowd(lab, llama, host_blocks=host_blocks, swap="coalesced")
        check_others(run, llama, set())
        reasons[host_blocks] = {(recovery.action, recovery.reason) for recovery in run.trace.recoveries}
    full, chosen = (Action.RECOMPUTE, "host pool full"), (Action.SWAP, "policy")
    assert reasons == {0: {full}, 12: {full, chosen}, 200: {chosen}}


@pytest.mark.parametrize("threshold", [0, 39, 45, 100])
def test_the_threshold_divides_by_cached_tokens(lab, llama, threshold: int) -> None:
    run = crowd(lab, llama, policy=make_policy("cross_point", threshold=threshold))
    check_others(run, llama, set())
    assert run.trace.recoveries
    for recovery in run.trace.recoveries:
        assert recovery.reason == "policy"
        # what is recomputed counts the token that was not cached yet
        swapped, cached = recovery.action is Action.SWAP, recovery.tokens - (recovery.action is Action.RECOMPUTE)
        assert swapped == (cached <= threshold)


def test_serve_keeps_the_order_it_was_given() -> None:
    engine = Engine(SimulatedExecutor(PublishedCosts(decode_s=0.01), 100), EngineConfig())
    items = [([0] * 4, Sampling(2), 5.0), ([0] * 8, Sampling(3), 0.0), ([0] * 6, Sampling(1), 2.5)]
    requests = engine.serve(items)
    assert [request.prompt_tokens for request in requests] == [4, 8, 6]
    assert [request.arrival_s for request in requests] == [5.0, 0.0, 2.5]
    assert not engine.busy and all(
        len(request.output) == s.max_tokens for request, (_, s, _) in zip(requests, items, strict=True)
    )
