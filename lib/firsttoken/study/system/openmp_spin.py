"""How long idle threads of OpenMP keep a core busy, for processes that compute in turns (standard library only)."""

from __future__ import annotations

import os

_SPINS = "20000"  # a third of a millisecond: longer than Python takes between two operations


def wait_briefly() -> None:
    """Let the threads of GNU's OpenMP sleep soon after an operation, unless the environment says otherwise.

    By default each spins 300,000 times, some milliseconds, in which the next process of a chain on the same machine has
    one core less. To be called before torch is loaded: the library reads it then.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
