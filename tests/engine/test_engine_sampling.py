"""Draws: a request's own, whatever its company and however often it is preempted; and how likely each was."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from listening import Listening
from plain_tokens import generated

from firsttoken.engine.preemption import Action
from firsttoken.engine.preemption.victims import VICTIMS
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.sampling import next_tokens
from firsttoken.study.errors import RequestError

SHARES = torch.tensor([0.02, 0.4, 0.05, 0.3, 0.13, 0.1])
LOGITS = SHARES.log() + 3.0


def waiting(sampling: Sampling, number: int = 0) -> ScheduledChunk:
    """A prompt of one token that is about to get its first."""
    return Request(number, [0], sampling, 0.0).chunk()


def test_greedy_is_the_largest() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    chunks = [waiting(Sampling()) for _ in range(50)]
    assert next_tokens(logits, chunks) == logits.argmax(-1).tolist()
    assert next_tokens(logits.bfloat16(), chunks) == logits.bfloat16().argmax(-1).tolist()


def test_each_draw_moves_on_and_a_seed_repeats_them_all() -> None:
    def series(seed: int) -> list[int]:
        chunk = waiting(Sampling(temperature=1.0, seed=seed))
        return [next_tokens(LOGITS[None], [chunk])[0] for _ in range(40)]

    assert series(7) == series(7)
    assert len({tuple(series(seed)) for seed in (-5, 0, 1, 2, 2**64 - 1)}) == 5
    assert len(set(series(0))) > 2
    torch.manual_seed(0)
    first = series(7)
    torch.manual_seed(1)
    assert series(7) == first


def test_a_request_goes_on_behind_its_output() -> None:
    """Where another process knows it with what it has said, and where its output became the prompt of another."""
    sampling = Sampling(50, temperature=1.2, top_p=0.95, seed=9)
    whole = Request(0, [1, 2], sampling, 0.0)
    for _ in range(50):
        whole.append(next_tokens(LOGITS[None], [whole.chunk()])[0], 0.0)
    for said in (0, 1, 17, 49):
        moved = Request(0, whole.tokens[: 2 + said], sampling, 0.0)
        moved.prompt_tokens = 2
        follower = Request(0, whole.tokens[: 2 + said], replace(sampling, max_tokens=50 - said, drawn=said), 0.0)
        for request in (moved, follower):
            for _ in range(50 - said):
                request.append(next_tokens(LOGITS[None], [request.chunk()])[0], 0.0)
            assert request.tokens == whole.tokens
    with pytest.raises(RequestError, match="drawn must be 0 or more, not -1"):
        Sampling(drawn=-1)


def test_half_a_prompt_draws_nothing() -> None:
    request = Request(0, [1, 2, 3], Sampling(temperature=1.0, seed=3), 0.0)
    whole = [next_tokens(LOGITS[None], [request.chunk(3)])[0] for _ in range(20)]
    again = Request(0, [1, 2, 3], Sampling(temperature=1.0, seed=3), 0.0)
    cut = []
    for _ in range(20):
        next_tokens(LOGITS[None], [again.chunk(2)])
        cut += next_tokens(LOGITS[None], [again.chunk(3)])
    assert cut == whole


# -- in the engine


SAMPLED = [Sampling(24, temperature=1.0 + n / 10, top_p=1.0 - n / 20, seed=n) for n in range(3)]
SAMPLED.append(Sampling(24, temperature=1.3, seed=3, top_k=30, min_p=0.01, frequency_penalty=0.7, presence_penalty=0.2))
SAMPLED.append(
    Sampling(24, repetition_penalty=1.4, presence_penalty=1.0, logit_bias=((7, 2.0),), min_tokens=24, stop=(7,))
)


@pytest.fixture(scope="module")
def alone(lab, llama) -> list[list[int]]:
    """What each of five prompts says by itself, in a pool where nobody is preempted."""
    outputs = []
    for one, sampling in zip(llama.known[-5:], SAMPLED, strict=True):
        run = lab.live(llama.model, 200)
        run.submit(one.prompt, sampling)
        outputs += run.finish()
        assert outputs[-1] != list(one.answer)
    return outputs


@pytest.mark.parametrize("blocks", [26, 200])
@pytest.mark.parametrize("policy", ["swap", "recompute"])
@pytest.mark.parametrize("scheduler", ["iteration_level", "prefill_first"])
def test_company_and_preemption_change_no_draw(lab, llama, alone, blocks: int, policy: str, scheduler: str) -> None:
    run = lab.live(llama.model, blocks, host_blocks=200, preemption=policy, scheduler=scheduler)
    for one, sampling in zip(llama.known[-5:], SAMPLED, strict=True):
        run.submit(one.prompt, sampling, 0.0)
        run.submit(one.prompt, Sampling(24), 0.0)
    outputs = run.finish()
    assert outputs[::2] == alone
    assert outputs[1::2] == [list(one.answer) for one in llama.known[-5:]]
    assert bool(run.trace.recoveries) == (blocks == 26 and scheduler == "prefill_first")


@pytest.mark.parametrize("victim", sorted(VICTIMS))
def test_no_victim_and_no_way_back_changes_a_draw(lab, llama, alone, victim: str) -> None:
    """With swap, recompute and both ends in turn, and blocks written through under every other rule."""
    turns, written = cycle(Action), len(victim) % 2 == 0
    policy = Listening(lambda tokens: next(turns))
    run = lab.live(llama.model, 26, host_blocks=200, policy=policy, victim=victim, write_through=written)
    for one, sampling in zip(llama.known[-5:], SAMPLED, strict=True):
        run.submit(one.prompt, sampling, 0.0)
        run.submit(one.prompt, Sampling(24), 0.0)
    outputs = run.finish()
    assert outputs[::2] == alone and outputs[1::2] == [list(one.answer) for one in llama.known[-5:]]
    assert {recovery.action for recovery in run.trace.recoveries} == set(Action)


def test_an_answer_in_two_requests(lab, llama, alone) -> None:
    run = lab.live(llama.model, 200)
    for n, (one, sampling) in enumerate(zip(llama.known[-5:], SAMPLED, strict=True)):
        said = 5 * n + 1
        run.submit([*one.prompt, *alone[n][:said]], replace(sampling, max_tokens=24 - said, drawn=said))
    assert run.finish() == [output[5 * n + 1 :] for n, output in enumerate(alone)]


@pytest.mark.parametrize("share", [False, True])
def test_greedy_penalties_are_those_of_transformers(lab, llama, share: bool) -> None:
    """Also where the beginning of the prompt was computed for somebody else."""
    one, asked = llama.known[-1], {"repetition_penalty": 1.4}
    run = lab.live(llama.model, 200, share_prefixes=share)
    outputs = []
    for _ in range(2):
        run.submit(one.prompt, Sampling(24, **asked))
        outputs.append(run.finish()[-1])
    lab.close()
    assert outputs == [generated(llama.model, one.prompt, 24, **asked).tokens] * 2 != [list(one.answer)] * 2


# -- how likely it was


def judged(model, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logarithms of shares [tokens - 1, vocabulary] of the token behind each place, by the model alone."""
    with torch.inference_mode():
        return model(torch.tensor([prompt + output])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize(
    ("scheduler", "blocks", "share"),
    [("sarathi", 200, False), ("sarathi", 200, True), ("prefill_first", 26, False)],
)
def test_chances_are_the_models_however_a_prompt_is_cut(lab, llama, scheduler, blocks, share) -> None:
    """In chunks, beside others, preempted, and where another has computed the same prompt before."""
    bounds = {"token_budget": 8, "requests": 8} if scheduler == "sarathi" else {}
    run = lab.live(llama.model, blocks, scheduler=scheduler, share_prefixes=share, **bounds)
    asked = Sampling(24, temperature=0.7, seed=3, logprobs=4, prompt_logprobs=True)
    requests = [run.submit(one.prompt, sampling) for one in llama.known[-5:] for sampling in (Sampling(24), asked)]
    outputs = run.finish()
    assert bool(run.trace.recoveries) == (blocks == 26)
    lab.close()  # the model computes by itself from here on
    for request, output in zip(requests[1::2], outputs[1::2], strict=True):
        shares = judged(llama.model, request.tokens[: request.prompt_tokens], output)
        token_logprobs = [*request.prompt_logprobs, *request.token_logprobs]
        assert len(token_logprobs) == len(shares)
        for token_logprob, row, token in zip(token_logprobs, shares, request.tokens[1:], strict=True):
            assert token_logprob.logprob == pytest.approx(float(row[token]), abs=1e-3)  # fp32, batched and alone
            values = row.topk(4).values.tolist()
            assert [logprob for _, logprob in token_logprob.top_logprobs] == pytest.approx(values, abs=1e-3)
    assert not any(request.token_logprobs or request.prompt_logprobs for request in requests[::2])
