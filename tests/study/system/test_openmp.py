"""Threads of OpenMP given back, and loops that need none; seen in the threads that the system has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firsttoken.study.system.openmp import give_back_threads, loops_on_one_core

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not TASKS.is_dir(), reason="the system does not list threads")


def threads(expected: int) -> int:
    """How many there are, ``expected`` within 5 s or not: the system lists one that has ended a moment longer."""
    deadline = time.monotonic() + 5
    while (there := len(list(TASKS.iterdir()))) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return there


def kept_after(last: Callable[[], object], again: int) -> tuple[int, ...]:
    """Threads beside one whose loops keep two: after a loop, after ``last``, and after a loop that keeps ``again``."""
    found = []

    def work() -> None:
        torch.set_num_threads(3)
        alone = len(list(TASKS.iterdir()))
        torch.ones(1 << 20).mul_(2)
        found.append(threads(alone + 2) - alone)
        last()
        found.append(threads(alone) - alone)
        torch.ones(1 << 20).mul_(2)
        found.append(threads(alone + again) - alone)

    before = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    return tuple(found)


def test_threads_are_given_back_and_come_again():
    assert kept_after(give_back_threads, again=2) == (2, 0, 2)


def test_loops_on_one_core_need_no_others():
    assert kept_after(loops_on_one_core, again=0) == (2, 0, 0)


def test_twice_and_where_nothing_is_kept():
    assert kept_after(lambda: (give_back_threads(), give_back_threads()), again=2) == (2, 0, 2)
