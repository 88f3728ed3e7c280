"""A plugin of pytest (``-p a_core_each``): each process of pytest-xdist, and what it starts, has a core of its own.

Two kernels that compute with two threads each on two cores wait for one another in every parallel loop: all notebooks,
two at a time, took 43 minutes on AVX2 instead of 25.
"""

from __future__ import annotations

import os
import re


def pytest_configure() -> None:
    worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    if worker and hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[int(worker[1]) % len(mine)]})
