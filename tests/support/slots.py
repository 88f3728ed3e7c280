"""What always holds of the blocks of a server's pool, whatever its sessions have done."""

from __future__ import annotations

import time
from collections import Counter
from itertools import count

from firsttoken.petals.kv_slots import KVSlots


def check_slots(slots: KVSlots) -> None:
    """Assert it in a moment in which the server, which is another thread, does not free a session's blocks: what is
    read between two of its statements is no fault, and is read again for up to two seconds."""
    for attempt in count(1):
        try:
            return _check(slots)
        except (AssertionError, RuntimeError):  # a dictionary that grows while it is read
            if attempt == 20:
                raise
            time.sleep(0.1)


def _check(slots: KVSlots) -> None:
    """Assert that each block is of one sequence at most, is written to by steps alone that have it, and has no owners
    but sequences and steps under way."""
    pool, homes = slots.pool, slots._homes.values()
    pool.check()
    assert all(mine.get(number) is sequence for mine, number, sequence in homes), "a sequence is lost"
    had = Counter(block for _, _, sequence in homes for block in sequence.blocks)
    assert max(had.values(), default=1) == 1, "two sequences have one block"
    assert slots._written <= set(slots._leased), "a block is written to that no step has"
    owners = {block: pool.owners(block) for block in range(pool.count) if pool.owners(block)}
    assert owners == dict(had + slots._leased), "a block has another number of owners than sequences and steps"
