"""Hidden states that no model has are refused by whoever receives them, in every coding and in a pass of training."""

from __future__ import annotations

import pytest
import torch

from firsttoken.petals.messages import SequenceChunk, check_states
from firsttoken.petals.tuning.passes import Pass, decode_pass, encode_pass
from firsttoken.petals.wire import CODINGS, decode, encode
from firsttoken.study.dtypes import LARGEST
from firsttoken.study.errors import SwarmError

NONSENSE = (3e38, -1e38, 1e30, 2 * LARGEST, float("nan"), float("inf"), -float("inf"))


@pytest.mark.parametrize("wrong", NONSENSE)
def test_nonsense_is_refused_wherever_it_stands(wrong):
    for place in ((0, 0), (1, 7), (2, 15)):
        hidden = torch.randn(3, 16)
        hidden[place] = wrong
        with pytest.raises(SwarmError, match="at fault"):
            check_states(hidden)
        for coding in CODINGS:
            with pytest.raises(SwarmError):  # some codings cannot even say it
                decode(encode(hidden, coding, [SequenceChunk(0, 0, 3)]), coding, 16, torch.float32)
        for one in (Pass(hidden[None], {}), Pass(torch.zeros(1, 3, 16), {}, gradient=hidden[None])):
            with pytest.raises(SwarmError, match=r"of a pass holds .*at fault"):
                decode_pass(encode_pass(one), 16)


def test_the_largest_states_that_models_have_pass():
    """700,000 were seen of Gemma 3; no states at all are no nonsense."""
    for value in (0.0, 7e5, -7e5, LARGEST, -LARGEST):
        check_states(torch.full((2, 4), value))
        check_states(torch.full((2, 4), value, dtype=torch.bfloat16))
    check_states(torch.empty(0, 16))
