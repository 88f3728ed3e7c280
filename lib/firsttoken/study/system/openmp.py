"""The threads that OpenMP keeps for every thread that has run a parallel loop, and how long they keep a core busy
(standard library only).

With more of them in a process than it has processors, libgomp lets none spin between two loops, and each loop waits
until its threads have been woken. An engine in a thread of its own said 93 tokens/s where the main thread had computed
before it, and 138 once that had given its threads back (16 requests of 135 M, two cores).
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_HARD = 2  # omp_pause_hard: what is kept is freed, and made again by the next loop
_SPINS = 20_000  # a third of a millisecond: longer than Python takes between two operations


def wait_policy(few_loops: bool) -> dict[str, str]:
    """The environment in which the threads of GNU's OpenMP sleep soon after a loop, unless that says otherwise already;
    a process reads it when it loads torch.

    By default each spins 300,000 times, some milliseconds, in which another process has one core less, and a step whose
    loops wait for a thread that is not let run is slow beside a busy process. The kernels' steps have ``few_loops``,
    and none of their threads waits for another's arrival: to sleep at once would cost them a third of their rate
    (SmolLM2-135M in stages, two cores: 110 for 165 tokens/s). Torch's operations are hundreds of loops a token: at a
    load of 18 on two cores it says 45 tokens/s where threads sleep at once, and 1 where they spin 20,000 times.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": str(_SPINS if few_loops else 0)}


def set_wait_policy(few_loops: bool = True) -> None:
    """Let the threads of this process, and of those that it starts, wait as :func:`wait_policy` says; to be called
    before torch is loaded."""
    os.environ.update(wait_policy(few_loops))


def give_back_threads() -> None:
    """Give back the OpenMP threads of the calling thread, outside of any loop; nothing where there is no OpenMP, or no
    such call.

    LLVM's OpenMP would end the loops of all threads, and is left alone.
    """
    with suppress(AttributeError, TypeError):
        library = ctypes.CDLL(None)
        if not hasattr(library, "__kmpc_fork_call"):
            library.omp_pause_resource_all(_HARD)


def loops_on_one_core() -> None:
    """Loops of the calling thread need no others from now on, and keep none.

    ``torch.set_num_threads`` would hold for threads to come as well. MKL has a number of its own, which stays.
    """
    give_back_threads()
    _run_loops_on(1)


@contextmanager
def loops_elsewhere() -> Iterator[None]:
    """Loops of the calling thread, an event loop's, take no others for the time of the block: others compute.

    What it kept before stays, so it should have run none. (To give back what a process before a fork had kept would
    wait for it without end.)
    """
    before = _run_loops_on(1)
    try:
        yield
    finally:
        _run_loops_on(before)


def _run_loops_on(count: int) -> int:
    """Run the calling thread's loops on ``count`` threads from now on; return how many it was before.

    Where there is no OpenMP, nothing is set and 1 returned.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].get_num_threads()  # before a thread's first loop torch says what it was told for all
    with suppress(AttributeError, TypeError):
        library = ctypes.CDLL(None)
        before = library.omp_get_max_threads()
        library.omp_set_num_threads(count)
        return before
    return 1
