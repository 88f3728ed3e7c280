"""Ends a decision that never returns: a loop in somebody's code, which nothing in that code would end."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from firsttoken.study.errors import ProfileError

LONGEST_S = 20.0  # of one decision, which takes a thousandth of a second


class TooLong(BaseException):
    """Raised in the decision itself; no ``except Exception`` there holds it up."""


class Decisions:
    """Says since when a decision is being taken, ``None`` between two."""

    def __init__(self) -> None:
        self.since_s: float | None = None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a decision; one within another is a part of it."""
        before, self.since_s = self.since_s, time.monotonic()
        try:
            yield
        finally:
            self.since_s = before


@contextmanager
def bounded(decisions: Decisions, whose: object) -> Iterator[None]:
    """Raises ProfileError, naming ``whose`` decision in the block took more than ``LONGEST_S``, while it is in Python.

    From a thread, not by a signal: a process in the background may ignore SIGINT, and not every system has SIGALRM.
    A browser has no threads, and its reader ends the decision.
    """
    if sys.platform == "emscripten":
        yield
        return
    over, here = threading.Event(), ctypes.c_ulong(threading.get_ident())

    def watch() -> None:
        while not over.wait(LONGEST_S / 10):
            since_s = decisions.since_s
            if since_s is not None and time.monotonic() - since_s > LONGEST_S:
                # again with each look: where it meets a callback of the collector, Python drops it
                ctypes.pythonapi.PyThreadState_SetAsyncExc(here, ctypes.py_object(TooLong))

    thread = threading.Thread(target=watch, name="patience", daemon=True)
    thread.start()
    try:
        yield
    except TooLong:
        raise ProfileError(f"{whose}: never finishes: a decision takes more than {LONGEST_S:g} s; mend it") from None
    finally:
        over.set()
        thread.join()
