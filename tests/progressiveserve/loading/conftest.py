"""What tests of loading share: threads that end, and files to read."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from read_blobs import make_blob

from firsttoken.progressiveserve.loading.reader import Blob

OURS = ("placer", "reader-")


@pytest.fixture(autouse=True)
def _quiet_threads() -> Iterator[None]:
    """A thread of ours never dies with a traceback, and none outlives its test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", pytest.PytestUnhandledThreadExceptionWarning)
        yield
    mine = [thread for thread in threading.enumerate() if thread.name.startswith(OURS)]
    deadline = time.monotonic() + 60
    for thread in mine:
        thread.join(max(0, deadline - time.monotonic()))
    assert not [thread for thread in mine if thread.is_alive()]


@pytest.fixture
def blobs(tmp_path: Path) -> list[Blob]:
    """Six files of two and a half chunks each."""
    return [make_blob(tmp_path / f"{i:02}.bin", 2500 + i) for i in range(6)]
