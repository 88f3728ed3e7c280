"""Threads of OpenMP given back, and loops that need none; seen in the threads that the system has."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from firsttoken.study.system.openmp import give_back_threads, loops_on_one_core

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not TASKS.is_dir(), reason="the system does not list threads")


def kept_after(last) -> tuple[int, ...]:
    """Threads beside one whose loops kept them: after a loop, after ``last``, and after another loop."""
    found = []

    def loop() -> int:
        torch.ones(1 << 20).mul_(2)
        return len(list(TASKS.iterdir()))

    def work() -> None:
        torch.set_num_threads(3)
        alone = len(list(TASKS.iterdir()))
        found.append(loop() - alone)
        last()
        found.append(len(list(TASKS.iterdir())) - alone)
        found.append(loop() - alone)

    before = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    return tuple(found)


def test_threads_are_given_back_and_come_again():
    assert kept_after(give_back_threads) == (2, 0, 2)


def test_loops_on_one_core_need_no_others():
    assert kept_after(loops_on_one_core) == (2, 0, 0)


def test_twice_and_where_nothing_is_kept():
    assert kept_after(lambda: (give_back_threads(), give_back_threads())) == (2, 0, 2)
