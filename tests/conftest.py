"""What tests of more than one part need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from firsttoken.assets.lock import load_lock
from firsttoken.engine.accelerator import accelerator
from firsttoken.study import progress
from firsttoken.study.system.compiled import ACCELERATOR
from firsttoken_cpu.native.library import kernels

# how long an example takes says more about what else the machine does than about the code
# The committed suite draws the same examples each time, so that it says the same of the same code: of ten runs beside
# other work one had drawn an example that no run before it had. HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("patient", settings.get_profile("explore"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "patient"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
progress.START_S = 600.0  # on a busy machine a second passes before an error that a test expects to stand alone


torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test begins on one thread and with the same random numbers, whatever the ones before it have set and drawn;
    one that is marked `assets` is skipped where they are not fetched.

    An experiment takes the cores that its profile names; two test processes with two threads each on two cores would
    wait for one another's time slices in every parallel loop after it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if item.get_closest_marker("assets"):
        missing = [member.saved_as for asset in load_lock() for member in asset.missing()]
        if missing:
            pytest.skip(f"{missing[0]} is not fetched; run `firsttoken fetch`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first, so that no process is left alone with one of them at the end."""

    def seconds(item: pytest.Item) -> float:
        mark = item.get_closest_marker("long")
        return mark.kwargs["seconds"] if mark else 0.0

    items.sort(key=seconds, reverse=True)


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Call it with a value of ``FIRSTTOKEN_ACCELERATOR``: within the test that computes, whatever the suite runs with.
    The kernels are those of this machine: with AMX, oneDNN multiplies bfloat16 by any value."""

    def switch(name: str) -> None:
        monkeypatch.setenv(ACCELERATOR, name)
        kernels.cache_clear()
        accelerator.cache_clear()

    yield switch
    kernels.cache_clear()
    accelerator.cache_clear()


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
