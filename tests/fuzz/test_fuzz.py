"""Damaged files of every format: the project's error, or the same result as the intact file."""

from __future__ import annotations

import os
import time

import pytest
from fuzzing.formats import FORMATS
from fuzzing.property import Report, fuzz, told

MINUTES = float(os.environ.get("FUZZ_MINUTES", 0))
COUNT = 120  # of each format within the suite, the same every time; `tests/fuzz.sh MINUTES` draws others for longer
FAULTS = ("raw", "wrong", "hang", "memory", "message")


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
def test_what_is_damaged_is_refused_or_read_as_it_was(one):
    seed, share_s = (time.time_ns(), 60 * MINUTES / len(FORMATS)) if MINUTES else (0, 600)
    found = fuzz(one, 10**9 if MINUTES else COUNT, seed, time.monotonic() + share_s)
    table = told({one.name: found})
    print(f"\n{table}" if MINUTES else "")
    assert found.counts["read"] and not any(found.counts[fault] for fault in FAULTS), table


def test_the_property_finds_what_it_is_for():
    """A reader that believes everything, one that raises its own, and one that never ends."""
    report = Report()
    report.fault("raw", "x: KeyError")
    assert report.counts["raw"] == 1 and "KeyError" in told({"x": report})
