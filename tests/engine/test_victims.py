"""Each victim rule, on requests that are written down here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from firsttoken.engine.preemption.resume import RESUME_ORDERS, resume_order_named
from firsttoken.engine.preemption.victims import OFTEN, VICTIMS, LeastExpected, victim_named
from firsttoken.engine.schedulers.scheduler_config import SchedulerConfig
from firsttoken.study.errors import ProfileError


def running(number: int, prompt: int, said: int, max_tokens: int, blocks: int = 0, preemptions: int = 0) -> Any:
    """A request that arrived as the ``number``-th, and has said ``said`` of ``max_tokens`` tokens."""
    return SimpleNamespace(
        number=number,
        order=(0.0, number),
        tokens=[0] * (prompt + said),
        cached=prompt + said - 1,
        times_s=[0.0] * said,
        sampling=SimpleNamespace(max_tokens=max_tokens),
        blocks=[0] * (blocks or -(-(prompt + said) // 16)),
        preemptions=preemptions,
        finished=False,
    )


FIVE = [
    running(3, 50, 9, 20),
    running(0, 90, 5, 60),
    running(4, 30, 1, 40),
    running(1, 70, 8, 10),
    running(2, 20, 4, 30),
]


@pytest.mark.parametrize(
    ("rule", "number"),
    [
        ("last_arrived", 4),
        ("first_arrived", 0),
        ("last_admitted", 2),
        ("longest", 0),
        ("shortest", 2),
        ("last_but_the_longest", 4),
        ("shortest_but_the_leader", 2),
        ("most_remaining", 0),
        ("least_remaining", 1),
        ("least_expected", 4),
        ("most_blocks_for_its_work", 2),
        ("least_delayed", 3),
        ("random", 1),
    ],
)
def test_the_victim_among_five(rule: str, number: int) -> None:
    assert victim_named(rule)(FIVE).number == number


def test_every_rule_is_above_and_takes_the_only_request() -> None:
    for rule in VICTIMS:
        assert victim_named(rule)(FIVE[:1]) is FIVE[0]


def test_the_longest_is_spared_though_it_came_last() -> None:
    late = running(9, 400, 1, 10)
    assert victim_named("last_but_the_longest")([*FIVE, late]).number == 4
    assert victim_named("last_arrived")([*FIVE, late]) is late


def test_a_request_that_was_preempted_often_is_spared_while_another_is_left() -> None:
    tired = [running(number, 20 + number, 1, 10, preemptions=OFTEN) for number in range(3)]
    rule = victim_named("shortest_but_the_leader")
    assert rule(tired).number == 0
    tired[1].preemptions -= 1
    assert rule(tired).number == 1


def test_what_is_expected_of_an_answer_is_learned_from_those_that_ended() -> None:
    rule = LeastExpected()
    young, old = running(0, 10, 2, 100), running(1, 10, 30, 100)
    ended = [running(number, 10, 34, 100) for number in (2, 3)]
    assert rule([young, old, *ended]) is young  # nothing has ended: it goes on as long again
    for request in ended:
        request.finished = True
    assert rule([young, old]) is old  # 4 tokens more, the young one 32
    assert rule([young, running(4, 10, 40, 100)]) is young  # longer than all that ended: 40 more


def test_a_rule_that_remembers_is_made_anew_for_each_engine() -> None:
    assert victim_named("least_expected") is not victim_named("least_expected")
    assert [victim_named("random")(FIVE).number for _ in range(2)] == [1, 1]


def test_names_that_are_unknown_say_which_are_known() -> None:
    with pytest.raises(ProfileError, match=r"no victim choice 'oldest'; .*first_arrived"):
        victim_named("oldest")
    with pytest.raises(ProfileError, match=r"no resume order 'shortest'; .*shortest_first"):
        resume_order_named("shortest")
    with pytest.raises(ProfileError, match="the resume order aged needs wait_s"):
        SchedulerConfig(resume="aged")
    assert set(RESUME_ORDERS) == {"in_order", "any_that_fits", "shortest_first", "aged"}
