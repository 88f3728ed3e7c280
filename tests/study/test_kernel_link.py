"""The kernel's limit, on the disk of this machine where root may set one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firsttoken.study.errors import LinkError
from firsttoken.study.system import kernel_files
from firsttoken_studies.probes import kernel_link
from firsttoken_studies.probes.kernel_link import KernelLimit, available, disk_of
from firsttoken_studies.probes.pagecache import evict, resident_fraction

RATE, SIZE = 50_000_000, 16_000_000
AHEAD_S = 0.15  # the kernel counts in slices of a tenth of a second, and lets the first one through at once
READ = """
import mmap, os, sys, time
way, path = sys.argv[1:]
start = time.monotonic()
if way == "mmap":
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        seen = sum(len(mapped[at : at + (1 << 20)]) for at in range(0, len(mapped), 1 << 20))
else:
    seen = len(open(path, "rb").read())
print(seen, time.monotonic() - start)
"""


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file that the page cache does not hold, on a disk that can be limited."""
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(SIZE))
    if reason := available(path):
        pytest.skip(reason)
    how = evict(path)
    if resident_fraction(path):
        pytest.skip(f"the file stays in the page cache: {how}")
    return path


@pytest.mark.parametrize("way", ["read", "mmap"])
def test_a_process_under_the_limit_reads_no_faster(cold: Path, way: str) -> None:
    with KernelLimit(cold, RATE) as limit:
        group = limit.group
        command = [sys.executable, "-S", "-c", READ, way, str(cold)]
        done = subprocess.run(command, preexec_fn=limit.join, capture_output=True, text=True, check=True)
    seen, seconds = done.stdout.split()
    assert int(seen) == SIZE
    assert float(seconds) > SIZE / RATE - AHEAD_S
    assert not group.exists()


def test_the_group_goes_though_a_process_is_still_in_it(cold: Path) -> None:
    with KernelLimit(cold, RATE) as limit:
        group = limit.group
        sleeper = subprocess.Popen(["sleep", "30"], preexec_fn=limit.join)
        members = (group / "cgroup.procs").read_text().split()
    try:
        assert members == [str(sleeper.pid)]
        assert not group.exists() and sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_rate_of_nothing_is_refused(cold: Path) -> None:
    with pytest.raises(LinkError, match="1 byte/s or more, not 0"), KernelLimit(cold, 0):
        pass


def test_what_cannot_be_limited_is_named(tmp_path: Path) -> None:
    if reason := available(tmp_path):
        pytest.skip(reason)
    assert "No such file" in available(tmp_path / "absent")
    assert "lies on no block device" in available(Path("/proc"))
    with pytest.raises(LinkError, match="no limit in the kernel: /proc lies on no block device"):
        KernelLimit(Path("/proc"), RATE).__enter__()


def test_a_user_who_is_not_root_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blkio(tmp_path, monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert available(tmp_path) == "no limit in the kernel: it needs root"


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "SYS", tmp_path)
    assert available(tmp_path) == f"no limit in the kernel: no blkio or io controller under {tmp_path}/fs/cgroup"


def test_a_limit_that_the_kernel_refuses_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that can be seen and written, below which no group can be made."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    blkio(tmp_path, monkeypatch)
    device = os.stat(tmp_path).st_dev
    disk = tmp_path / "sys" / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    disk.mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")

    def refuse(prefix: str, dir: Path) -> str:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel_link.tempfile, "mkdtemp", refuse)
    assert available(tmp_path) == "the kernel refuses to limit disk 8:0: Operation not permitted"


def blkio(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/sys with a blkio controller."""
    group = root / "sys" / "fs" / "cgroup" / "blkio"
    group.mkdir(parents=True)
    (group / kernel_link._V1_LIMIT).write_text("")
    monkeypatch.setattr(kernel_files, "SYS", root / "sys")


def test_a_partition_stands_for_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree of /sys for a disk with one partition."""
    disk = tmp_path / "devices" / "sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (disk / "sda1" / "dev").write_text("8:1\n")
    (disk / "sda1" / "partition").write_text("1\n")
    block = tmp_path / "dev" / "block"
    block.mkdir(parents=True)
    monkeypatch.setattr(kernel_files, "SYS", tmp_path)
    (block / "8:0").symlink_to(disk)
    (block / "8:1").symlink_to(disk / "sda1")
    assert disk_of(8, 1) == disk_of(8, 0) == "8:0"
    assert disk_of(9, 9) is None
