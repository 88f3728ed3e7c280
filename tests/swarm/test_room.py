"""Who has which blocks of a server: nothing is given twice, nothing is lost, and what does not fit changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.study.errors import BusyError, FirstTokenError, RequestError
from firsttoken.swarm.room import LostError, Room, Tenant
from firsttoken.swarm.wire import Stretch

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
