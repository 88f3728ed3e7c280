"""Files that wait to refine weights: a few at once, and memory that goes with what is in it."""

from __future__ import annotations

import threading

import pytest
import torch

from firsttoken.progressiveserve.loading.host_memory import WeightMemoryBlock, room_for
from firsttoken.progressiveserve.loading.read_memory import RefinementMemory
from firsttoken.study.errors import LinkError

CPU = torch.device("cpu")


def waiting(memory: RefinementMemory, size: int) -> tuple[threading.Thread, list]:
    """A reader that asks for ``size`` bytes, and what it got."""
    got: list = []

    def read() -> None:
        try:
            got.append(memory.allocate(size))
        except LinkError as error:
            got.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, got


def test_a_reader_waits_until_a_file_is_let_go():
    memory = RefinementMemory(most=100)
    first, second = memory.allocate(60), memory.allocate(40)
    thread, got = waiting(memory, 10)
    memory.free(memoryview(bytearray(5)))  # of another load: it frees nothing
    assert not got
    memory.free(first[:3])  # a part of it, as it is handed on
    thread.join(60)
    assert len(got) == 1 and len(got[0]) == 10
    memory.free(second)
    memory.free(second)
    assert len(memory.allocate(90)) == 90


def test_a_file_that_is_longer_than_all_is_alone():
    memory = RefinementMemory(most=100)
    whole = memory.allocate(1000)
    thread, got = waiting(memory, 1)
    assert not got
    memory.free(whole)
    thread.join(60)
    assert len(got[0]) == 1


def test_who_waits_when_the_load_ends_is_told():
    memory = RefinementMemory(most=100)
    memory.allocate(100)
    thread, got = waiting(memory, 1)
    memory.close()
    thread.join(60)
    assert isinstance(got[0], LinkError)
    with pytest.raises(LinkError, match="the load was stopped"):
        memory.allocate(1)


@pytest.mark.parametrize("count", [3, 1 << 20])
def test_a_room_holds_what_is_put_there(count):
    shapes = [(2, count), (1,), (count, 3)]
    room = WeightMemoryBlock(sum(room_for(shape, torch.float32) for shape in shapes), CPU)
    taken = [room.take(shape, torch.float32) for shape in shapes]
    for number, weights in enumerate(taken):
        weights.fill_(number)
    assert [tuple(weights.shape) for weights in taken] == shapes
    assert all(bool((weights == number).all()) for number, weights in enumerate(taken))
    assert all(weights.data_ptr() % 64 == 0 for weights in taken)
