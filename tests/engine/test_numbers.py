"""Logits that are no finite numbers end the request that has them, in every mode, and nobody else notices."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from schedules import draw_schedule, perform
from torch import nn
from transformers import LlamaConfig

from firsttoken.engine.async_engine import AsyncEngine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import MIN_LOGPROB, Request, Sampling, ScheduledChunk
from firsttoken.engine.sampling import argmax_tokens, next_tokens, token_logprob
from firsttoken.engine.sdpa_attention import PaddedAttend
from firsttoken.study.errors import OutputError
from firsttoken_cpu.native.library import kernels
from firsttoken_cpu.native_attend import NativeAttend

ANSWER = 24
NAN, INF = math.nan, math.inf
SHAPE = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    vocab_size=256,
    max_position_embeddings=512,
    pad_token_id=0,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
MODES = [
    Sampling(ANSWER),
    Sampling(ANSWER, temperature=1.0, top_p=0.9),
    Sampling(ANSWER, logprobs=3),
    Sampling(ANSWER, prompt_logprobs=True, logprobs=0),
]


class ParseError:
    """A model whose embedding of the token ``bad`` is ``what``; ``known`` are answers that it has no part in."""

    def __init__(self, subject: Any, what: float) -> None:
        said = {token for one in subject.known for token in (*one.prompt, *one.answer)}
        self.bad = next(token for token in range(256) if token not in said)
        self.known = subject.known
        self.model: nn.Module = copy.deepcopy(subject.model)
        with torch.no_grad():
            self.model.model.embed_tokens.weight[self.bad, 3] = what

    def prompt(self, length: int, at: int) -> list[int]:
        """``length`` tokens, ``bad`` at one place."""
        return [self.bad if place == at else place % 7 + 1 for place in range(length)]


@pytest.fixture(scope="module")
def whole(make_subject) -> Any:
    return make_subject(SHAPE)


@pytest.fixture(scope="module", params=[NAN, INF, -INF])
def damaged(request: pytest.FixtureRequest, whole) -> ParseError:
    return ParseError(whole, request.param)


def chunks(count: int, sampling: Sampling = MODES[0]) -> list[ScheduledChunk]:
    return [Request(number, [1, 2, 3], sampling, 0.0).chunk() for number in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sampling", MODES)
def test_a_row_that_is_no_number_fails_alone(dtype: torch.dtype, sampling: Sampling) -> None:
    draw = random.Random(0)
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    bad = {row: draw.choice((NAN, INF)) for row in draw.sample(range(40), 15)}
    for row, what in bad.items():
        logits[row, draw.randrange(300)] = what
    logits[0], bad[0] = -INF, -INF
    asked = chunks(40, sampling)
    tokens = next_tokens(logits, asked)
    assert {row for row, chunk in enumerate(asked) if isinstance(chunk.request.failure, OutputError)} == bad.keys()
    if not sampling.temperature:
        assert all(tokens[row] == int(logits[row].argmax()) for row in range(40) if row not in bad)
    assert all(
        len(chunk.request.token_logprobs) == (sampling.logprobs is not None)
        for row, chunk in enumerate(asked)
        if row not in bad
    )
    assert not any(chunk.request.token_logprobs for row, chunk in enumerate(asked) if row in bad)
    with pytest.raises(OutputError, match="no finite number; copy its weights again"):
        argmax_tokens(logits)


def test_some_logits_of_minus_infinity_are_a_mask() -> None:
    logits = torch.full((1, 5), -INF)
    logits[0, 3] = 2.0
    (chunk,) = chunks(1, MODES[2])
    assert next_tokens(logits, [chunk]) == [3] == argmax_tokens(logits).tolist() and chunk.request.failure is None
    assert chunk.request.token_logprobs[0] == token_logprob(logits[0], 3, 3)
    assert [share for _, share in chunk.request.token_logprobs[0].top_logprobs] == [0.0, MIN_LOGPROB, MIN_LOGPROB]


def in_company(run, damaged: ParseError, sampling: Sampling) -> list[Request]:
    """Requests with and without the bad token, of which the first are ended by it; checks the others."""
    ill = [run.submit(damaged.prompt(length, at), sampling) for length, at in ((30, 0), (30, 29), (9, 4))]
    fine = [run.submit(one.prompt, Sampling(ANSWER)) for one in damaged.known]
    later = [run.submit(one.prompt, Sampling(ANSWER), run.engine.executor.now() + 0.02) for one in damaged.known]
    run.finish()
    assert all(isinstance(one.failure, OutputError) and not one.output for one in ill)
    assert all(one.failure is None for one in fine + later)
    assert [one.output for one in fine + later] == 2 * [list(one.answer) for one in damaged.known]
    return ill


@pytest.mark.parametrize("sampling", MODES)
@pytest.mark.parametrize("scheduler", ["prefill_first", "sarathi"])
def test_only_the_request_at_fault_ends(lab, damaged, sampling: Sampling, scheduler: str) -> None:
    """In little room: what it leaves in its blocks is read by nobody who has them next."""
    run = lab.live(
        damaged.model, 24, host_blocks=24, preemption="swap", requests=8, token_budget=16, scheduler=scheduler
    )
    ill = in_company(run, damaged, sampling)
    assert run.engine.failed() == ill or {one.number for one in ill}


def test_blocks_that_hold_no_numbers_are_not_shared(lab, damaged) -> None:
    run = lab.live(damaged.model, 200, share_prefixes=True)
    in_company(run, damaged, MODES[0])
    assert run.engine.prefixes.find(Request(99, damaged.prompt(30, 0), MODES[0], 0.0)) == []


class Poisoned(LiveExecutor):
    """What was never written is no number, in the pool and in the host's."""

    way: type = PaddedAttend

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, attend=self.way, **options)
        self.pool.rows.fill_(NAN)
        if self.host_pool is not None:
            self.host_pool.all_rows.fill_(NAN)


class PoisonedNative(Poisoned):
    way = NativeAttend


@pytest.mark.parametrize("kind", [Poisoned, PoisonedNative])
def test_nothing_is_read_that_was_not_written(lab, whole, kind: type[LiveExecutor]) -> None:
    if kind is PoisonedNative and kernels() is None:
        pytest.skip("nothing is read by the kernels: there are none here")
    for seed in range(24):
        perform(lab, whole, draw_schedule(seed, len(whole.known), arrivals=False), kind=kind)


def test_a_stream_ends_with_it_and_the_others_go_on(lab, damaged) -> None:
    run = lab.live(damaged.model, 200)
    with AsyncEngine(run.engine) as server:
        ill = server.submit(damaged.prompt(12, 5), Sampling(ANSWER))
        fine: Sequence[Any] = [server.submit(one.prompt, Sampling(ANSWER)) for one in damaged.known]
        with pytest.raises(OutputError, match="no finite number"):
            list(ill)
        assert [list(stream) for stream in fine] == [list(one.answer) for one in damaged.known]
        assert server.stats().running == server.stats().blocks_used == 0


def test_a_run_raises_it(lab, damaged) -> None:
    run = lab.live(damaged.model, 200)
    with pytest.raises(OutputError, match="no finite number"):
        run.engine.serve([(damaged.prompt(4, 0), MODES[0], 0.0), (damaged.known[0].prompt, MODES[0], 0.0)])
    (fine,) = run.engine.serve([(damaged.known[0].prompt, MODES[0], 0.0)])
    assert fine.output == list(damaged.known[0].answer)
