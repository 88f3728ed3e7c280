"""Who has which blocks of a server: nothing is given twice, nothing is lost, and what does not fit changes nothing."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slots import check_slots

from firsttoken.petals.fairness import Client
from firsttoken.petals.kv_slots import CachedSequence, KVSlots, MissingTokensError
from firsttoken.petals.messages import SequenceChunk
from firsttoken.study.errors import BusyError, FirstTokenError, RequestError

CLIENTS = (Client("one", "a"), Client("one", "b"), Client("two", "c"))
DO = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["step", "step", "begin", "ahead", "finish", "forget", "leave"]),
    st.integers(0, 3),
    st.integers(1, 30),
)


@settings(max_examples=150)
@given(st.lists(DO, max_size=60), st.sampled_from([0.0, 1000.0]))
def test_a_block_that_a_step_has_is_nobody_elses_until_it_has_run(doings, spare_s):
    """Three clients' sessions place, hand over, finish, forget and go at any time, while steps of theirs are under way;
    what a step writes is never a block that another sequence has got, or another step writes, meanwhile."""
    slots = KVSlots(8, 4, 6, 40, spare_s)
    sessions = [{} for _ in CLIENTS]
    under_way: list[tuple[int, list]] = []
    for who, what, number, tokens in doings:
        mine = sessions[who]
        if what in ("step", "begin", "ahead") and all(whose != who for whose, _ in under_way):  # one at a time
            cached = mine[number].cached if number in mine else 0
            start = {"step": cached, "begin": 0, "ahead": cached + 1}[what]
            chunk = SequenceChunk(number, start, start + tokens)
            before = {key: CachedSequence(list(one.blocks), one.cached) for key, one in mine.items()}
            try:
                chunks = slots.place(mine, [chunk], client=CLIENTS[who])
            except FirstTokenError:  # others may have lost their blocks to steps under way
                assert mine == before or (under_way and mine.items() <= before.items())
            else:
                assert what != "ahead" and len(chunks[0].request.blocks) * 4 >= chunk.end
                slots.lease(chunks)
                under_way.append((who, chunks))
        elif what == "finish" and under_way:
            whose, chunks = under_way.pop(number % len(under_way))
            written = {block for chunk in chunks for block in chunk.request.blocks}
            for other, one in ((other, one) for other, session in enumerate(sessions) for one in session.values()):
                assert other == whose or not written & set(one.blocks)
            slots.computed(sessions[whose], [SequenceChunk(chunks[0].request.number, chunks[0].start, chunks[0].end)])
            slots.release(chunks)
        elif what == "forget":
            slots.free(mine, [number])
        elif what == "leave":
            slots.free(mine, list(mine))
        check_slots(slots)
        assert slots.held <= 6
    for _, chunks in under_way:
        slots.release(chunks)
    for mine in sessions:
        slots.free(mine, list(mine))
    check_slots(slots)
    assert slots.pool.free == slots.pool.count and slots.held == 0


def test_two_steps_never_write_to_one_block():
    slots, mine = KVSlots(8, 4, 2, 40), {}
    chunks = slots.place(mine, [SequenceChunk(0, 0, 6)])
    slots.lease(chunks)
    for twice in (chunks, slots.place(mine, [SequenceChunk(0, 0, 2)])):
        with pytest.raises(RuntimeError, match="two steps would write to one block"):
            slots.lease(twice)
    check_slots(slots)
    slots.release(chunks)
    check_slots(slots)


def test_who_needs_blocks_of_steps_under_way_waits_for_them_in_line():
    slots, many, few = KVSlots(4, 4, 4, 40), {}, {}

    async def run() -> list[int]:
        chunks = slots.place(many, [SequenceChunk(0, 0, 16)], client=CLIENTS[0])
        slots.lease(chunks)
        waits = [
            asyncio.create_task(slots.placed(few, [SequenceChunk(number, 0, 4)], 0, CLIENTS[2])) for number in range(2)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not many and not any(one.done() for one in waits) and not slots.pool.free
        waits[0].cancel()
        slots.release(chunks)
        await waits[1]
        return list(few)

    assert asyncio.run(run()) == [1]
    check_slots(slots)


@pytest.mark.parametrize(
    ("chunk", "kind", "said"),
    [
        (SequenceChunk(0, 1, 2), MissingTokensError, "sequence 0 has 0 tokens here, and the step begins at 1"),
        (SequenceChunk(0, 0, 41), RequestError, "sequence 0 of 41 tokens exceeds the context of 40"),
        (SequenceChunk(0, 0, 33), BusyError, "the pool of 32 tokens is full"),
    ],
)
def test_what_has_no_room_is_told(chunk, kind, said):
    slots = KVSlots(8, 4, 2, 40)
    with pytest.raises(kind, match=said):
        slots.place({}, [chunk])
    assert slots.pool.free == 8


def test_layers_that_a_client_has_left_out_are_not_there_any_more():
    """Until it sends its sequence again from the first token."""
    slots, mine = KVSlots(8, 4, 2, 40), {}
    for start, end, first in ((0, 5, 2), (5, 6, 3)):
        slots.place(mine, [SequenceChunk(0, start, end)], first)
        slots.computed(mine, [SequenceChunk(0, start, end)])
    with pytest.raises(MissingTokensError, match="sequence 0 has nothing here of layer 2, where the step begins"):
        slots.place(mine, [SequenceChunk(0, 6, 7)], 2)
    slots.place(mine, [SequenceChunk(0, 0, 7)], 1)
    assert mine[0].first == 1
