"""Requests of a workload: what is refused, and token ids where there are none."""

from __future__ import annotations

import math

import pytest

from firsttoken.engine.workload_items import Item, with_ids
from firsttoken.study.errors import RequestError


@pytest.mark.parametrize("time", [-0.1, math.nan, math.inf])
def test_times_that_are_none(time):
    with pytest.raises(RequestError, match=r"cannot arrive at .* s; give a time from 0 on"):
        Item(time, 1, 1)


@pytest.mark.parametrize("lengths", [(0, 1), (1, 0), (-4, 1), (1, -4)])
def test_lengths_that_are_none(lengths):
    with pytest.raises(RequestError, match=r"prompt and -?\d output tokens: give both 1 or more"):
        Item(0, *lengths)


def test_a_prompt_of_another_length():
    with pytest.raises(RequestError, match="says 3 prompt tokens and brings 2"):
        Item(0, 3, 1, prompt=(5, 6))


def test_random_ids_follow_the_seed_and_leave_real_ones_alone():
    items = (Item(0, 400, 1), Item(1, 2, 5, prompt=(3, 4)), Item(2, 400, 1))
    filled = with_ids(items, vocabulary=10, seed=1)
    assert filled == with_ids(items, vocabulary=10, seed=1) != with_ids(items, vocabulary=10, seed=2)
    assert filled[1] == items[1]
    assert [(item.arrival_s, item.prompt_tokens, item.output_tokens) for item in filled] == [
        (item.arrival_s, item.prompt_tokens, item.output_tokens) for item in items
    ]
    assert set(filled[0].prompt) == set(range(10))
    assert filled[0].prompt != filled[2].prompt
    assert all(type(token) is int for token in filled[0].prompt)


def test_vocabularies_that_do_not_fit():
    with pytest.raises(RequestError, match="from a vocabulary of 0; give the model's"):
        with_ids([Item(0, 1, 1)], vocabulary=0)
    with pytest.raises(RequestError, match="token id 40 is not in a vocabulary of 32; use the model's own tokenizer"):
        with_ids([Item(0, 2, 1, prompt=(40, 2))], vocabulary=32)
