"""Memory that is backed before it is written."""

from __future__ import annotations

import sys

import pytest

from firsttoken.progressiveserve.loading.reader import host_memory
from firsttoken.study.system.direct_io import back
from firsttoken_studies.probes.footprint import MemoryGrowth


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the call")
def test_brings_the_pages_and_keeps_what_is_there():
    memory = host_memory(32 << 20)
    memory[5] = 7
    growth = MemoryGrowth()
    back(memory)
    assert growth.bytes() >= 16 << 20, "half of it at least is in memory now"
    assert memory[5] == 7 and memory[-1] == 0


def test_does_nothing_where_the_system_has_no_such_call(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    back(memoryview(bytearray(8)))
    monkeypatch.undo()
    back(memoryview(b""))
