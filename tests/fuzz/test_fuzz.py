"""ParseError files of every format: the project's error, or the same result as the intact file."""

from __future__ import annotations

import os
import time

import pytest
from fuzzing import mutators, property
from fuzzing.formats import FORMATS
from fuzzing.property import Format, fuzz, told

MINUTES = float(os.environ.get("FUZZ_MINUTES", 0))
COUNT = 120  # of each format within the suite, the same every time; `tests/fuzz.sh MINUTES` draws others for longer
FAULTS = ("raw", "wrong", "hang", "memory", "message")


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
def test_what_is_damaged_is_refused_or_read_as_it_was(one):
    longer = (10**9, time.time_ns(), 60 * MINUTES / len(FORMATS))
    found = fuzz(one, *longer) if MINUTES else fuzz(one, COUNT)
    table = told({one.name: found})
    print(f"\n{table}" if MINUTES else "")
    assert found.counts["read"] and not any(found.counts[fault] for fault in FAULTS), table


def stubborn(path):
    """A reader that believes one byte, raises its own error for another, and never ends for a third."""
    first = (path / "file").read_bytes()[:1]
    while first in (b"h", b""):
        time.sleep(0.01)
    if first == b"r":
        raise KeyError("raw")
    return first


@pytest.mark.parametrize(("byte", "kind"), [(b"w", "wrong"), (b"r", "raw"), (b"h", "hang")])
def test_the_property_finds_what_it_is_for(byte, kind, monkeypatch):
    monkeypatch.setattr(property, "WAITS_S", 1)
    one = Format("stubborn", lambda path: (path / "file").write_bytes(b"i"), ("file",), stubborn, (lambda *_: byte,))
    monkeypatch.setattr(mutators, "place", lambda path, dice: path.write_bytes(byte))
    found = fuzz(one, 2)
    assert found.counts[kind] == found.counts["read"] == 2 and kind in told({"stubborn": found})
