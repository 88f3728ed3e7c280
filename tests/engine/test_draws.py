"""Draws by numpy: each token as often as it should come, one number a draw, and never a token without a share."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from firsttoken.engine.draws import choose, draw
from firsttoken.engine.request import Sampling

LOGITS = np.log(np.array([0.02, 0.4, 0.05, 0.3, 0.13, 0.1], dtype=np.float32)) + np.float32(3.0)
HIGHEST = float(np.nextafter(1.0, 0.0))  # that a generator gives


def generator(seed: int, drawn: int = 0) -> np.random.Generator:
    return Sampling(seed=seed, drawn=drawn).numbers()


class Given:
    """Numbers that are known before; ``left`` of them were not taken."""

    def __init__(self, *numbers: float) -> None:
        self.left = list(numbers)

    def random(self) -> float:
        return self.left.pop(0)


def tempered(logits: np.ndarray, temperature: float) -> np.ndarray:
    shares = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return shares / shares.sum()


def nucleus(shares: np.ndarray, top_p: float) -> list[int]:
    """The tokens before each of which lies less than ``top_p``, one by one."""
    kept, before = [], 0.0
    for token in sorted(range(len(shares)), key=lambda one: -shares[one]):
        if before < top_p or top_p == 1:
            kept.append(token)
        before += shares[token]
    return kept


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.8, 1.0), (1.0, 0.8), (1.3, 0.95)])
def test_tokens_come_as_often_as_their_shares_say(temperature: float, top_p: float) -> None:
    logits = np.random.default_rng(5).normal(0, 1.2, 60).astype(np.float32)
    shares = tempered(logits, temperature)
    kept = nucleus(shares, top_p)
    assert (len(kept) < 60) is (top_p < 1)
    numbers, count = generator(11), 60_000
    seen = np.bincount([draw(logits, temperature, top_p, numbers) for _ in range(count)], minlength=60)
    wanted = count * shares[kept] / shares[kept].sum()
    assert seen[kept].sum() == count
    squares = ((seen[kept] - wanted) ** 2 / wanted).sum()
    freedom = len(kept) - 1
    assert squares < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations of a chi-square


@pytest.mark.parametrize("top_p", [5e-324, 1e-9, 0.3, 0.5, 0.9, 0.999, 1 - 2**-53])
def test_the_nucleus_of_many_tokens(top_p: float) -> None:
    """What can be drawn, seen at numbers that lie close together; equal logits among them, as in bfloat16."""
    logits = np.random.default_rng(1).normal(0, 2, 300).round(1).astype(np.float32)
    kept = nucleus(tempered(logits, 1.0), top_p)
    given = np.linspace(0, HIGHEST, 20_000)
    seen = {draw(logits, 1.0, top_p, Given(number)) for number in given}
    assert seen <= set(kept) and draw(logits, 1.0, top_p, Given(HIGHEST)) in kept
    assert len(kept) - len(seen) <= 0.1 * len(kept)  # a share of less than a step of ``given`` may be missed


@pytest.mark.parametrize(
    ("options", "process", "warp"),
    [
        ({"top_k": 7}, [], [theirs.TopKLogitsWarper(7)]),
        ({"top_k": 10**9}, [], []),
        ({"min_p": 0.1}, [], [theirs.MinPLogitsWarper(0.1)]),
        ({"min_p": 1.0}, [], [theirs.MinPLogitsWarper(1.0)]),
        ({"top_k": 20, "min_p": 0.02}, [], [theirs.TopKLogitsWarper(20), theirs.MinPLogitsWarper(0.02)]),
        ({"top_k": 9, "top_p": 0.8}, [], [theirs.TopKLogitsWarper(9), theirs.TopPLogitsWarper(0.8)]),
        ({"repetition_penalty": 1.3}, [theirs.RepetitionPenaltyLogitsProcessor(1.3)], []),
        ({"repetition_penalty": 0.7}, [theirs.RepetitionPenaltyLogitsProcessor(0.7)], []),
        ({"min_tokens": 4, "stop": (3, 5)}, [theirs.MinNewTokensLengthLogitsProcessor(3, 4, [3, 5])], []),
        ({"min_tokens": 3, "stop": (3, 5)}, [theirs.MinNewTokensLengthLogitsProcessor(3, 3, [3, 5])], []),
        ({"logit_bias": ((4, 2.5), (9, -9.0))}, [theirs.SequenceBiasLogitsProcessor([[[4], 2.5], [[9], -9.0]])], []),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.4])
def test_options_are_those_of_transformers(options, process, warp, temperature: float) -> None:
    """After three tokens of a prompt and three of an answer, by logits of which some are equal."""
    tokens = [3, 3, 50, 8, 8, 60]
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(0, 2, 100).astype(np.float32)
        logits[60:] = logits[60:].round(1)
        scores = theirs.LogitsProcessorList(process)(torch.tensor([tokens]), torch.from_numpy(logits).double()[None])
        if temperature:
            scores = theirs.LogitsProcessorList(warp)(torch.tensor([tokens]), scores / temperature)
        sampling, like = Sampling(temperature=temperature, **options), Sampling(temperature=float(temperature > 0))
        for number in np.linspace(0, HIGHEST, 300):
            wanted = choose(scores[0].numpy(), like, tokens, 3, Given(number))
            assert choose(logits, sampling, tokens, 3, Given(number)) == wanted


def test_frequency_and_presence_count_the_answer_alone() -> None:
    """As vLLM's ``apply_penalties`` has it: repetition of both first, then of the answer each time and each token."""
    tokens, generated = [3, 3, 50, 8, 8, 60], 3
    for seed in range(50):
        logits = np.random.default_rng(seed).normal(0, 2, 100)
        wanted = logits.copy()
        for token in set(tokens):
            wanted[token] = wanted[token] / 1.2 if wanted[token] > 0 else wanted[token] * 1.2
        for token in tokens[-generated:]:
            wanted[token] -= 1.5
        for token in set(tokens[-generated:]):
            wanted[token] -= -0.8
        for temperature in (0.0, 0.9):
            penalties = {"frequency_penalty": 1.5, "presence_penalty": -0.8, "repetition_penalty": 1.2}
            chosen = choose(logits, Sampling(temperature=temperature, **penalties), tokens, generated, generator(seed))
            assert chosen == choose(wanted, Sampling(temperature=temperature), tokens, generated, generator(seed))


def test_where_no_token_is_left_one_is_chosen() -> None:
    """All of them would end an answer that may not end; the penalty of a token that is ruled out stays a number."""
    everything = Sampling(min_tokens=9, stop=tuple(range(6)), repetition_penalty=100.0)
    for temperature in (0.0, 5e-324, 1.0):
        token = choose(LOGITS, replace(everything, temperature=temperature), [1, 2], 1, generator(0))
        assert 0 <= token < 6


def test_the_first_of_equals_are_in_the_nucleus() -> None:
    logits = np.array([0, 1, 0, 1, 0, 1, 1], dtype=np.float32)
    share = np.e / (4 * np.e + 3)
    for count, kept in enumerate([[1], [1, 3], [1, 3, 5], [1, 3, 5, 6]]):
        seen = {draw(logits, 1.0, (count + 0.5) * share, Given(number)) for number in np.linspace(0, HIGHEST, 500)}
        assert seen == set(kept)


@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.5])
@pytest.mark.parametrize("number", [0.0, 5e-324, 0.3, 0.5, HIGHEST])
def test_no_token_without_a_share_is_drawn(number: float, top_p: float) -> None:
    """At either end of the vocabulary, and where the sums of many shares are rounded."""
    for seed in range(50):
        logits = np.random.default_rng(seed).normal(0, 3, 5000).astype(np.float32)
        there = np.arange(5000) % 3 == 1
        there[:7] = there[-7:] = False
        logits[~there] = -np.inf if seed % 2 else -1e30
        assert there[draw(logits, 1.0, top_p, Given(number))]
    mask = np.full(5, -np.inf, dtype=np.float32)
    mask[3] = 2.0
    assert draw(mask, 1.0, top_p, Given(number)) == 3


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-4])
@pytest.mark.parametrize("number", [0.0, 0.5, HIGHEST])
def test_next_to_no_temperature_leaves_the_largest_alone(temperature: float, number: float) -> None:
    for top_p in (5e-324, 0.5, 1.0):
        assert draw(LOGITS, temperature, top_p, Given(number)) == 1
        assert draw(np.array([-1e308, 1e308, -np.inf]), temperature, top_p, Given(number)) == 1
    both = {draw(np.array([2.0, 1.0, 2.0]), temperature, 1.0, Given(one)) for one in (0.0, HIGHEST)}
    assert both == {0, 2}  # equals share


def test_a_temperature_beyond_all_logits_makes_all_equal() -> None:
    logits = np.array([3.0, -1e30, 1e30, 0.0], dtype=np.float32)
    seen = [draw(logits, sys.float_info.max, 1.0, Given(number)) for number in (0.1, 0.3, 0.6, 0.9)]
    assert seen == [0, 1, 2, 3]
    assert draw(logits, 10**40, 1.0, Given(0.1)) == 0


@pytest.mark.parametrize("top_p", [1.0, 0.5, 1e-9])
@pytest.mark.parametrize("temperature", [5e-324, 1.0, 1e300])
def test_one_number_a_draw(temperature: float, top_p: float) -> None:
    given = Given(0.2, 0.4, 0.6)
    draw(LOGITS, temperature, top_p, given)
    assert given.left == [0.4, 0.6]
    one, other = generator(7), generator(7, drawn=20)
    for _ in range(20):
        draw(LOGITS, temperature, top_p, one)
    assert one.random() == other.random()


def test_logits_are_left_as_they_are() -> None:
    for dtype in (np.float32, np.float64):
        logits = LOGITS.astype(dtype)
        draw(logits, 0.5, 0.5, generator(0))
        assert np.array_equal(logits, LOGITS.astype(dtype))


def test_halves_are_drawn_from_as_their_floats() -> None:
    halves = torch.from_numpy(np.random.default_rng(2).normal(0, 2, 4000)).bfloat16()
    one, other = generator(3), generator(3)
    for top_p in (1.0, 0.9) * 50:
        assert draw(halves.double().numpy(), 1.0, top_p, one) == draw(halves.float().numpy(), 1.0, top_p, other)


def test_a_seed_has_64_bits() -> None:
    firsts = {seed: generator(seed).random() for seed in (-(2**63), -5, -1, 0, 1, 2, 2**63, 2**64 - 1)}
    assert firsts[-1] == firsts[2**64 - 1] and firsts[-(2**63)] == firsts[2**63]
    assert len(set(firsts.values())) == 6
    assert generator(4, 3).random() == generator(4).random(4)[3]
    assert Sampling(seed=4, drawn=2).numbers(generated=1).random() == generator(4).random(4)[3]
