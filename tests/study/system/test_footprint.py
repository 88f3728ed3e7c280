"""What a process takes, with what the system has for telling."""

from __future__ import annotations

import mmap
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from firsttoken_studies.probes import footprint
from firsttoken_studies.probes.footprint import MemoryGrowth, peak, reset_peak, resident

MIB = 1 << 20


def grow(size: int) -> mmap.mmap:
    """``size`` bytes of memory that this process did not have before, all of it touched."""
    memory = mmap.mmap(-1, size)
    memory.write(b"\1" * size)
    return memory


def test_growth_is_what_was_taken(capsys) -> None:
    growth = MemoryGrowth()
    if not growth._forgotten:
        pytest.skip("this kernel forgets no peak")
    grow(32 * MIB).close()
    assert 30 * MIB < growth.bytes() < 200 * MIB
    again = MemoryGrowth()
    assert again.bytes() < 30 * MIB, "the former peak is forgotten"


def test_without_proc_ps_and_getrusage_tell(proc: Path) -> None:
    try:
        subprocess.run(["ps", "-o", "rss=", "-p", "1"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no ps")
    assert not reset_peak()
    now = resident()
    assert 0 < now <= 1.1 * peak() and now % 1024 == 0
    growth = MemoryGrowth()
    grow(peak() - now + 32 * MIB).close()
    assert growth.bytes() > 30 * MIB


def test_growth_below_a_peak_that_is_not_forgotten_is_unknown(proc: Path) -> None:
    grow(64 * MIB).close()
    growth = MemoryGrowth()
    assert growth.bytes() is None


def test_without_proc_and_ps_the_resident_size_is_unknown(proc: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resident() is None and peak() > 0 and MemoryGrowth().bytes() is None


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("linux", 1024), ("freebsd14", 1024)])
def test_macos_counts_the_peak_in_bytes(proc: Path, monkeypatch: pytest.MonkeyPatch, platform: str, unit: int) -> None:
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5))
    monkeypatch.setattr("sys.platform", platform)
    assert peak() == 5 * unit


def test_a_proc_that_lacks_the_fields_is_as_none(proc: Path) -> None:
    """gVisor's, for one, keeps no peak."""
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "status").write_text("Name:\tpython\nVmRSS:\t    2048 kB\nThreads:\t1\n")
    (proc / "self" / "clear_refs").write_text("")
    assert resident() == 2 * MIB
    assert peak() == footprint._peak_by_rusage()
    assert not reset_peak()
