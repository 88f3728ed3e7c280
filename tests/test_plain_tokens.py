"""The comparison of greedy tokens: what it lets pass, and that it notices what is wrong."""

from __future__ import annotations

import pytest
import torch
from plain_tokens import TOLERANCE, Plain, check_greedy, generated, judged
from transformers import AutoModelForCausalLM

from firsttoken.assets.shapes import shape_config

LOGITS = torch.tensor([[0.0, 1.0, 5.0, 2.0], [3.0, 3.0 - TOLERANCE / 2, 1.0, 0.0], [0.0, 4.0, 1.0, 2.0]])
PLAIN = Plain([2, 0, 1], LOGITS)


def test_the_same_tokens_pass():
    assert check_greedy([2, 0, 1], PLAIN) == 3


def test_a_near_tie_may_go_either_way_and_ends_the_comparison():
    assert check_greedy([2, 1, 3], PLAIN) == 2
    assert check_greedy([2, 1], PLAIN) == 2, "how long the other answer is does not matter either"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([1, 0, 1], "token 0 is 1, but 2 wins by 4"),
        ([2, 0, 3], "token 2 is 3, but 1 wins by 2"),
        ([2, 2, 1], "token 1 is 2, but 0 wins by 2"),  # a near tie is between two, and no excuse for a third
        ([2, 0], "2 tokens for 3"),
        ([2, 0, 1, 1], "4 tokens for 3"),
        ([], "0 tokens for 3"),
    ],
)
def test_what_is_wrong_is_noticed(said, message):
    with pytest.raises(AssertionError, match=message):
        check_greedy(said, PLAIN)


def test_with_less_tolerance_a_near_tie_is_wrong():
    with pytest.raises(AssertionError, match="token 1 is 1, but 0 wins"):
        check_greedy([2, 1, 1], PLAIN, tolerance=TOLERANCE / 4)


def test_exact_tokens_are_no_near_ties():
    with pytest.raises(AssertionError, match=r"wins by 5\.0e-04 only: choose another prompt"):
        PLAIN.exact()
    assert Plain([2, 1], LOGITS[::2]).exact() == [2, 1]


def test_answers_are_judged_token_by_token():
    """What ``generate`` says passes, and each token that is changed is noticed, whatever stands around it."""
    config = shape_config("tiny-2")
    config.update({"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
    prompt = [5, 6, 7]
    plain = generated(model, prompt, 8)
    said = plain.exact()
    assert check_greedy(said, judged(model, prompt, said)) == 8
    for place in range(8):
        wrong = [*said[:place], (said[place] + 1) % 256, *said[place + 1 :]]
        with pytest.raises(AssertionError, match=f"token {place} is"):
            check_greedy(wrong, judged(model, prompt, wrong))
        with pytest.raises(AssertionError, match=f"token {place} is"):
            check_greedy(wrong, plain)
