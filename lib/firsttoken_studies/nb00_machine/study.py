"""What this machine can do at most: the rates that every floor is computed from.

Each rate is measured a few times in the way its users work: large contiguous copies, one sequential read, one square
matrix product. Rates count each byte once (a copy of 1 GB in 1 s is 1 GB/s) and are decimal (1 GB = 1e9 bytes).
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firsttoken.study import paths
from firsttoken.study.dtypes import computing
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.profile import Profile
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken.study.timing import Stopwatch, timed
from firsttoken_studies.probes.pagecache import evict, resident_fraction
from firsttoken_studies.record.results import Outcome, Rows

MIB = 1024 * 1024
READ_MIB = 8  # one read call; larger ones gain nothing, smaller ones pay for more calls

Row = dict[str, Any]


@dataclass(frozen=True)
class MachineConfig:
    """Sizes of the measurement: MiB copied, MiB read from disk, n of an n x n matrix product, repeats of each."""

    copy_mib: int
    disk_mib: int
    matmul_n: int
    repeats: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise FirstTokenError(f"machine.{name} must be at least 1, not {value}")


def experiment(profile: Profile) -> Outcome:
    """The ceilings of the profile's device as an outcome."""
    rows = measure_ceilings(profile.section("machine", MachineConfig), profile.torch_device())
    return Outcome(rows=rows, provenance={"source": "random bytes and matrices", "kind": "random"})


def ceilings_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The median of each rate, by its name."""
    rates: dict[str, Rows] = {}
    for row in rows:
        rates.setdefault(row["what"], []).append(row)
    summary = Summary()
    for rate, group in rates.items():
        summary.add(rate, bootstrap([row["value"] for row in group], stat="median").summary(group[0]["unit"]))
    return summary


def measure_ceilings(config: MachineConfig, device: torch.device | str) -> list[Row]:
    """Rows {what, repeat, value, unit, how} of every rate that ``device`` has.

    Always memcpy, disk_read_cold and disk_read_warm; matmul_fp32 and matmul_bf16 on ``device``; on a CUDA device also
    h2d_pinned, d2h_pinned and device_memcpy. Raises FirstTokenError when the disk cannot hold the test file.
    """
    device = torch.device(device)
    rows = _copies(config, device) + _products(config, device)
    with _random_file(config.disk_mib * MIB) as path:
        rows += _reads(path, config.repeats)
    return rows


def _copies(config: MachineConfig, device: torch.device) -> list[Row]:
    """Copies within main memory and, with CUDA, over the bus in both directions and within device memory."""
    size, threads = config.copy_mib * MIB, torch.get_num_threads()
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))  # written once, so touched
    pairs = {"memcpy": (source, target, f"torch copy_, {config.copy_mib} MiB, {threads} threads")}
    if device.type == "cuda":
        pinned, destination_buffer = source.pin_memory(), source.to(device)
        how = f"torch copy_, {config.copy_mib} MiB"
        pairs["h2d_pinned"] = (pinned, destination_buffer, f"{how}, pinned host memory")
        pairs["d2h_pinned"] = (destination_buffer, pinned, f"{how}, pinned host memory")
        pairs["device_memcpy"] = (destination_buffer, torch.empty_like(destination_buffer), how)
    rows = []
    for pair, (origin, destination, how) in pairs.items():
        seconds = timed(partial(destination.copy_, origin, non_blocking=True), repeats=config.repeats, device=device)
        rows += _rates(pair, seconds, size / 1e9, "GB_per_s", how)
    return rows


def _products(config: MachineConfig, device: torch.device) -> list[Row]:
    """Multiply square matrices; 2 n^3 operations each. Where bf16 is slow its matrices are a quarter as wide: the rate
    is the same, and seven products of 1,024 would take 22 s."""
    rows = []
    for product, dtype in (("matmul_fp32", torch.float32), ("matmul_bf16", torch.bfloat16)):
        generator = torch.Generator(device).manual_seed(0)
        slow = dtype == torch.bfloat16 and computing(device) != dtype
        n = max(1, config.matmul_n // 4) if slow else config.matmul_n
        shape = (n, n)
        first_factor, second_factor = (
            torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2)
        )
        out = torch.empty_like(first_factor)
        seconds = timed(
            partial(torch.mm, first_factor, second_factor, out=out), repeats=config.repeats, warmup=2, device=device
        )
        how = f"torch.mm, {n} x {n} on {device.type}"
        how += f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        rows += _rates(product, seconds, 2 * n**3 / 1e9, "GFLOP_per_s", how)
    return rows


def _reads(path: Path, repeats: int) -> list[Row]:
    """Sequential reads of ``path``, each cold one followed by a warm one."""
    size = path.stat().st_size
    # On a virtual machine the first touch of fresh memory can cost more than the disk: ones, not empty.
    target = np.ones(size, dtype=np.uint8)
    rows = []
    for repeat in range(repeats):
        how = evict(path)
        rows += _rates("disk_read_cold", [_read_seconds(path, target)], size / 1e9, "GB_per_s", how, repeat)
        resident = resident_fraction(path)
        how = "page cache, not verified" if resident is None else f"page cache, {resident:.0%} of its pages resident"
        rows += _rates("disk_read_warm", [_read_seconds(path, target)], size / 1e9, "GB_per_s", how, repeat)
    return rows


def _read_seconds(path: Path, target: np.ndarray) -> float:
    """Seconds to read ``path`` into ``target`` [bytes] with read(2)."""
    view, step, done = memoryview(target), READ_MIB * MIB, 0
    with open(path, "rb", buffering=0) as file, Stopwatch() as watch:
        while count := file.readinto(view[done : done + step]):
            done += count
    if done != len(view):
        raise FirstTokenError(f"read {done} of {len(view)} bytes of the disk test file; run it again")
    return watch.seconds


@contextmanager
def _random_file(size: int) -> Iterator[Path]:
    """A file of ``size`` random bytes on the disk of the cache, gone afterwards. Random, as some disks compress."""
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=paths.CACHE, prefix="disk-test-")
    try:
        with os.fdopen(handle, "wb") as file:
            random, remaining = np.random.default_rng(), size
            while remaining > 0:
                remaining -= file.write(random.bytes(min(remaining, READ_MIB * MIB)))
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    except OSError as error:
        raise FirstTokenError(
            f"disk test of {size // MIB} MiB: {error.strerror}; free space or set machine.disk_mib"
        ) from error
    finally:
        os.unlink(name)


def _rates(rate: str, seconds: list[float], amount: float, unit: str, how: str, first: int = 0) -> list[Row]:
    return [
        {"what": rate, "repeat": first + index, "value": amount / second, "unit": unit, "how": how}
        for index, second in enumerate(seconds)
    ]
