"""Work beside a forward pass that does not take its processors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from firsttoken.study.system.openmp import loops_on_one_core


def on_pinned_core(name: str, work: Callable[[], None]) -> threading.Thread:
    """A thread that has begun ``work``, in which torch's parallel loops are not.

    With two threads for the placer and two for the forward pass, on two cores, each loop waits for one that does not
    run: the first bits of a model of 135 M took 1.06 to 1.45 s to place so, and 0.82 to 1.04 s on one (n=3 each).
    """

    def alone() -> None:
        torch.get_num_threads()  # torch takes the number that holds for all when a thread first asks
        loops_on_one_core()
        work()

    thread = threading.Thread(target=alone, name=name, daemon=True)
    thread.start()
    return thread
