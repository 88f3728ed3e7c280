"""Reads of a part of a file give the same bytes with and without each facility."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from firsttoken.study.system.direct_io import is_cached, open_uncached, read_at, read_no_further

DATA = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def handle(path: Path):
    handle = os.open(path, os.O_RDONLY)
    yield handle
    os.close(handle)


@pytest.mark.parametrize("gone", [(), ("preadv",)], ids=["preadv", "no preadv"])
def test_a_read_fills_the_buffer_up_to_the_end_of_the_file(handle: int, without, gone: tuple[str, ...]) -> None:
    without(*gone)
    buffer = bytearray(b"\xff" * 100)
    assert read_at(handle, memoryview(buffer), 1000) == 100 and buffer == DATA[1000:1100]
    buffer = bytearray(b"\xff" * 100)
    assert read_at(handle, memoryview(buffer), len(DATA) - 30) == 30
    assert buffer == DATA[-30:] + b"\xff" * 70
    assert read_at(handle, memoryview(buffer), len(DATA)) == 0
    with pytest.raises(OSError):
        read_at(-1, memoryview(buffer), 0)


def test_without_the_flag_no_one_knows_what_is_cached(handle: int, without) -> None:
    read_at(handle, memoryview(bytearray(1)), 0)
    assert is_cached(handle) in (True, None)
    without("RWF_NOWAIT")
    assert is_cached(handle) is None
    without("preadv")
    assert is_cached(handle) is None


def test_without_direct_reads_there_is_no_such_handle(path: Path, without) -> None:
    without("O_DIRECT")
    assert open_uncached(path) is None


def test_macos_turns_caching_off_for_an_open_file(path: Path, without, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    without("O_DIRECT")
    monkeypatch.setattr(fcntl, "F_NOCACHE", 48, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda handle, command, value: asked.append((handle, command, value)))
    handle = open_uncached(path)
    assert asked == [(handle, 48, 1)] and os.pread(handle, 16, 0) == DATA[:16]
    os.close(handle)
    with pytest.raises(FileNotFoundError):
        open_uncached(path.with_name("absent"))


def test_reading_ahead_may_be_no_one_s_to_stop(handle: int, without) -> None:
    read_no_further(handle)
    without("posix_fadvise")
    read_no_further(handle)
