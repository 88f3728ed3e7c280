"""A link's rate set in the kernel, for whole processes: any loader in them is held to it, however it reads.

A control group with a read limit on one disk (cgroup v1 blkio.throttle.read_bps_device, cgroup v2 io.max). It counts
what leaves the disk: buffered, direct, mmap and io_uring reads alike (129 MB/s each of the first three, measured at
125 MB/s), and nothing that the page cache still holds. The kernel counts in slices of a tenth of a second and lets the
first one through at once. Whatever else a process reads from that disk, its libraries too, comes at the same rate. The
standard library only.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from firsttoken.study.errors import LinkError
from firsttoken.study.system import kernel_files

_TRIED_BYTES_PER_S = 1 << 30
_V1_LIMIT = "blkio.throttle.read_bps_device"
_ATTEMPTS, _PAUSE_S = 50, 0.02  # a process that has just ended still counts as a member for a moment


def available(path: Path) -> str | None:
    """Return None when reads of ``path`` can be limited here, else the reason in a line; it tries to set a limit."""
    try:
        with KernelLimit(path, _TRIED_BYTES_PER_S):
            return None
    except LinkError as error:
        return str(error)


def _obstacle(path: Path) -> str | None:
    root = _controller()
    if root is None:
        return f"no blkio or io controller under {_cgroup()}"
    if os.geteuid() != 0:
        return "it needs root"
    if not os.access(root, os.W_OK):
        return f"{root} is read-only here, as in a container without privileges"
    try:
        device = os.stat(path).st_dev
    except OSError as error:
        return f"{path}: {error.strerror}"
    if disk_of(os.major(device), os.minor(device)) is None:
        return f"{path} lies on no block device (a file system in memory, of the network, or an overlay)"
    return None


def disk_of(major: int, minor: int) -> str | None:
    """The whole disk, as "major:minor", of a block device or one of its partitions; None when there is none such.

    The kernel limits disks, not partitions.
    """
    device = kernel_files.SYS / "dev" / "block" / f"{major}:{minor}"
    if not device.exists():
        return None
    device = device.resolve()
    disk = device.parent if (device / "partition").exists() else device
    return (disk / "dev").read_text(encoding="ascii").strip()


class KernelLimit:
    """Within the context, processes that ``join`` read at most ``bytes_per_s`` from the disk that holds ``path``.

    The limit is one for all of them together, and holds for their children too; ``group`` is their control group while
    there is one. Raises LinkError on entry, with the reason.
    """

    def __init__(self, path: Path, bytes_per_s: float) -> None:
        self.path = path
        self.bytes_per_s = bytes_per_s
        self.group: Path | None = None

    def __enter__(self) -> KernelLimit:
        if reason := _obstacle(self.path):
            raise LinkError(f"no limit in the kernel: {reason}")
        if self.bytes_per_s < 1:
            raise LinkError(f"a limit in the kernel is 1 byte/s or more, not {self.bytes_per_s}")
        root = _controller()
        device = os.stat(self.path).st_dev
        disk, rate = disk_of(os.major(device), os.minor(device)), int(self.bytes_per_s)
        try:
            if root == _cgroup():
                (root / "cgroup.subtree_control").write_text("+io", encoding="ascii")
            self.group = Path(tempfile.mkdtemp(prefix="firsttoken-", dir=root))
            if root == _cgroup():
                (self.group / "io.max").write_text(f"{disk} rbps={rate}", encoding="ascii")
            else:
                (self.group / _V1_LIMIT).write_text(f"{disk} {rate}", encoding="ascii")
        except OSError as error:
            self._remove()
            raise LinkError(f"the kernel refuses to limit disk {disk}: {error.strerror}") from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._remove()

    def join(self) -> None:
        """Put the calling process under the limit; made for ``preexec_fn`` of subprocess, so it does little."""
        handle = os.open(f"{self.group}/cgroup.procs", os.O_WRONLY)
        os.write(handle, b"0")  # 0: the process that writes
        os.close(handle)

    def _remove(self) -> None:
        """Remove the group; a process that is still in it goes on without the limit."""
        if self.group is None:
            return
        for _ in range(_ATTEMPTS):
            for pid in (self.group / "cgroup.procs").read_text(encoding="ascii").split():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    (self.group.parent / "cgroup.procs").write_text(pid, encoding="ascii")
            try:
                self.group.rmdir()
                break
            except OSError:
                time.sleep(_PAUSE_S)
        self.group = None


def _controller() -> Path | None:
    """The group below which a limit can be made: blkio's own hierarchy (v1), or the unified one (v2) if it has io."""
    if (_cgroup() / "blkio" / _V1_LIMIT).exists():
        return _cgroup() / "blkio"
    controllers = kernel_files.read(_cgroup() / "cgroup.controllers").split()
    return _cgroup() if "io" in controllers else None


def _cgroup() -> Path:
    return kernel_files.SYS / "fs" / "cgroup"
