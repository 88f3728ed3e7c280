"""Cold files, and how much of that could be verified."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from pathlib import Path

import pytest

from firsttoken.study.system.direct_io import read_ahead, read_no_further
from firsttoken_studies.probes import pagecache
from firsttoken_studies.probes.pagecache import evict, resident_fraction

SIZE = (1 << 20) + 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(SIZE))
    return path


def test_an_evicted_file_is_cold_and_a_read_one_is_warm(path: Path) -> None:
    if resident_fraction(path) in (None, 0.0):
        pytest.skip("mincore says nothing of this file system")
    how = evict(path)
    assert "cold" in how and " by " in how
    if (left := resident_fraction(path)) != 0:
        pytest.skip(f"this file system keeps its pages ({left:.0%} left; {how})")
    assert how.endswith("0% of its pages resident before the read")
    path.read_bytes()
    assert resident_fraction(path) == 1


def test_an_empty_file_has_no_page_in_memory(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert resident_fraction(tmp_path / "empty") == 0
    assert "cold" in evict(tmp_path / "empty")


def test_a_file_partly_in_memory(path: Path) -> None:
    evict(path)
    if resident_fraction(path) != 0:
        pytest.skip("this file system keeps its pages")
    handle = os.open(path, os.O_RDONLY)
    read_no_further(handle)
    os.pread(handle, 1, 0)
    os.close(handle)
    assert 0 < resident_fraction(path) < 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux brings all of a file in one call")
def test_a_file_that_is_read_ahead_is_there_whole(tmp_path: Path) -> None:
    """Also behind the 8 MB to which Linux cuts what it is merely advised of."""
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(20 << 20))
    evict(path)
    if resident_fraction(path) != 0:
        pytest.skip("this file system keeps its pages")
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 14):
        pytest.skip("this kernel has no such call")
    read_ahead(path)
    assert resident_fraction(path) == 1


def test_an_empty_file_is_read_ahead_and_one_that_is_missing_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    read_ahead(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        read_ahead(tmp_path / "missing")


def test_without_mincore_nothing_is_verified(path: Path, library_without) -> None:
    library_without("mincore")
    assert resident_fraction(path) is None
    assert evict(path).endswith("not verified")


def test_a_mincore_that_refuses_verifies_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache, "_libc", lambda name: lambda *arguments: -1)
    assert resident_fraction(path) is None


def test_without_posix_fadvise_the_mapping_is_invalidated(path: Path, without, proc: Path) -> None:
    """As on macOS, where that drops the pages; Linux takes the call and keeps them, and so says."""
    without("posix_fadvise")
    how = evict(path)
    assert " by msync, " in how and path.stat().st_size == SIZE


def test_without_any_means_it_says_so(path: Path, without, proc: Path, library_without) -> None:
    without("posix_fadvise")
    library_without("msync")
    assert evict(path).startswith("cold (in a guest or not is not known) by no means this system has, ")


def test_what_linux_hides_from_another_user_is_not_believed(as_nobody) -> None:
    """mincore says "in memory" of every page of a file that its caller may not write."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.bin"
        path.write_bytes(os.urandom(SIZE))
        for place, mode in ((folder, 0o755), (path, 0o644)):
            os.chmod(place, mode)
        assert as_nobody(lambda: (resident_fraction(path), evict(path).endswith("not verified"))) == (None, True)
        path.chmod(0o666)
        assert as_nobody(lambda: resident_fraction(path)) == resident_fraction(path)
