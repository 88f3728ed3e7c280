"""What tests of more than one part need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test begins on one thread, whatever the ones before it have set.

    An experiment takes the cores that its profile names; two test processes with two threads each on two cores wait
    for one another's time slices in every parallel loop: the schedules of the engine took five times as long.
    """
    torch.set_num_threads(1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; the test is skipped where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
