"""Who has which blocks of a server: nothing is given twice, nothing is lost, and what does not fit changes nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.petals.fairness import Client
from firsttoken.petals.kv_slots import LostError, Room, Tenant
from firsttoken.petals.wire import Stretch
from firsttoken.study.errors import BusyError, FirstTokenError, RequestError

STEP = st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 30), st.integers(1, 20), st.booleans())


@given(st.lists(STEP, max_size=40))
def test_any_steps_of_two_sessions_leave_the_books_right(steps):
    room, sessions = Room(12, 4, 6, 40), ({}, {})
    for who, number, start, tokens, ends in steps:
        mine, stretch = sessions[who], [Stretch(number, start, start + tokens)]
        before = {key: Tenant(list(one.blocks), one.cached) for key, one in mine.items()}, room.held
        try:
            (work,) = room.place(mine, stretch)
        except FirstTokenError:
            assert (mine, room.held) == before
        else:
            assert len(work.request.blocks) * 4 >= work.end
            room.computed(mine, stretch)
            assert mine[number].cached == start + tokens
        if ends:
            room.leave(mine, [number, 99])
        room.pool.check()
        owned = [block for one in sessions for tenant in one.values() for block in tenant.blocks]
        assert len(owned) == len(set(owned)) == room.pool.count - room.pool.free
        assert room.held == sum(map(len, sessions)) <= 6
    for mine in sessions:
        room.leave(mine, list(mine))
    assert room.pool.free == room.pool.count and room.held == 0


CLIENTS = (Client("one", "a"), Client("one", "b"), Client("two", "c"))
DO = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["step", "step", "begin", "finish", "forget", "leave"]),
    st.integers(0, 3),
    st.integers(1, 30),
)


@settings(max_examples=150)
@given(st.lists(DO, max_size=60), st.sampled_from([0.0, 1000.0]))
def test_a_block_that_a_step_has_is_nobody_elses_until_it_has_run(doings, spare_s):
    """Three clients' sessions place, hand over, finish, forget and go at any time, while steps of theirs are under way;
    what a step writes is never a block that another sequence has got, or another step writes, meanwhile."""
    room = Room(8, 4, 6, 40, spare_s)
    sessions = [{} for _ in CLIENTS]
    under_way: list[tuple[int, list]] = []
    for who, what, number, tokens in doings:
        mine = sessions[who]
        if what in ("step", "begin") and all(whose != who for whose, _ in under_way):  # one at a time, as messages come
            start = mine[number].cached if what == "step" and number in mine else 0
            with suppress(FirstTokenError):
                stretch = Stretch(number, start, start + tokens)
                works = room.place(mine, [stretch], client=CLIENTS[who])
                room.lease(works)
                under_way.append((who, works))
        elif what == "finish" and under_way:
            whose, works = under_way.pop(number % len(under_way))
            written = {block for work in works for block in work.request.blocks}
            for other, one in ((other, one) for other, session in enumerate(sessions) for one in session.values()):
                assert other == whose or not written & set(one.blocks)
            room.computed(sessions[whose], [Stretch(works[0].request.number, works[0].start, works[0].end)])
            room.release(works)
        elif what == "forget":
            room.leave(mine, [number])
        elif what == "leave":
            room.leave(mine, list(mine))
        room.check()
        assert room.held <= 6
    for _, works in under_way:
        room.release(works)
    for mine in sessions:
        room.leave(mine, list(mine))
    room.check()
    assert room.pool.free == room.pool.count and room.held == 0


def test_two_steps_never_write_to_one_block():
    room, mine = Room(8, 4, 2, 40), {}
    works = room.place(mine, [Stretch(0, 0, 6)])
    room.lease(works)
    for twice in (works, room.place(mine, [Stretch(0, 0, 2)])):
        with pytest.raises(RuntimeError, match="two steps would write to one block"):
            room.lease(twice)
    room.check()
    room.release(works)
    room.check()


def test_who_needs_blocks_of_steps_under_way_waits_for_them_in_line():
    room, many, few = Room(4, 4, 4, 40), {}, {}

    async def run() -> list[int]:
        works = room.place(many, [Stretch(0, 0, 16)], client=CLIENTS[0])
        room.lease(works)
        waits = [asyncio.create_task(room.placed(few, [Stretch(number, 0, 4)], 0, CLIENTS[2])) for number in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not many and not any(one.done() for one in waits) and not room.pool.free
        waits[0].cancel()
        room.release(works)
        await waits[1]
        return list(few)

    assert asyncio.run(run()) == [1]
    room.check()


@pytest.mark.parametrize(
    ("stretch", "kind", "said"),
    [
        (Stretch(0, 1, 2), LostError, "sequence 0 has 0 tokens here, and the step begins at 1"),
        (Stretch(0, 0, 41), RequestError, "sequence 0 of 41 tokens exceeds the context of 40"),
        (Stretch(0, 0, 33), BusyError, "the pool of 32 tokens is full"),
    ],
)
def test_what_has_no_room_is_told(stretch, kind, said):
    room = Room(8, 4, 2, 40)
    with pytest.raises(kind, match=said):
        room.place({}, [stretch])
    assert room.pool.free == 8


def test_layers_that_a_client_has_left_out_are_not_there_any_more():
    """Until it sends its sequence again from the first token."""
    room, mine = Room(8, 4, 2, 40), {}
    for start, end, first in ((0, 5, 2), (5, 6, 3)):
        room.place(mine, [Stretch(0, start, end)], first)
        room.computed(mine, [Stretch(0, start, end)])
    with pytest.raises(LostError, match="sequence 0 has nothing here of layer 2, where the step begins"):
        room.place(mine, [Stretch(0, 6, 7)], 2)
    room.place(mine, [Stretch(0, 0, 7)], 1)
    assert mine[0].first == 1
