"""A folder for sockets, wherever TMPDIR points."""

from __future__ import annotations

import socket
import stat
import tempfile
from pathlib import Path

import pytest

from firsttoken.study.errors import StorageError
from firsttoken_studies.probes import sockets
from firsttoken_studies.probes.sockets import remove_folder, socket_folder


@pytest.mark.parametrize("length", [1, 40, 60, 61, 62, 63, 64, 110, 200])
def test_a_socket_can_be_made_below_any_temporary_folder(length: int, tmp_path: Path, monkeypatch) -> None:
    """One that is too long is not used, and one that is short enough is; nobody else may enter."""
    long = Path("/tmp") / ("t" * (length - len("/tmp/")) or "x")
    long.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = socket_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder.parent == long) == (length <= 60)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(folder / ("s" * 19)))
    finally:
        remove_folder(folder)
        long.rmdir()
    assert not folder.exists()


def test_without_a_short_folder_one_line_names_the_variable(tmp_path: Path, monkeypatch) -> None:
    """Nothing else can mend it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 110)))
    monkeypatch.setattr(sockets, "MOST_PATH", 10)
    with pytest.raises(StorageError, match="set TMPDIR to a shorter one"):
        socket_folder()
