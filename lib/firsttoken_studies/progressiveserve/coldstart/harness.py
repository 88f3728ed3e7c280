"""Trials in random order, each a fresh process that meets cold files (ProgressiveServe 3.4.3; errata I3, I4, I14)."""

from __future__ import annotations

import compileall
import importlib
import json
import mmap
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from firsttoken.link.shaped import LinkConfig
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.progress import track
from firsttoken.study.system import kernel_files
from firsttoken.study.system.compiled import shared_library
from firsttoken_cpu.native.exports import SOURCE
from firsttoken_studies.probes.kernel_link import KernelLimit, available
from firsttoken_studies.probes.pagecache import evict, resident_fraction
from firsttoken_studies.progressiveserve.coldstart.spec import TrialSpec
from firsttoken_studies.record.results import Rows

KERNEL, BUCKET, SERVER, NONE = "kernel", "bucket", "data server", "none"
TRIAL = "firsttoken_studies.progressiveserve.coldstart.trial"
A_LINK = " a link"  # of a name: there are several such links side by side


@dataclass(frozen=True)
class TrialLink:
    """The link of a group of trials: its rate (0: unshaped), who limits it, and whether the files start cold.

    A "kernel" limit holds for the whole process, so for every loader; a token "bucket" holds for our own reads, and is
    what there is without root, or beyond the disk's own speed, where the files wait in memory (not ``cold``). A "data
    server" is a process of its own that sends at this rate; a loader that opens files itself cannot read from it.
    """

    gbit_per_s: float
    shaped_by: str
    cold: bool = True
    parallel: bool = False  # several such links side by side, where a variant takes several

    @property
    def name(self) -> str:
        """Return the name of the link in tables."""
        of_a_server = f", {SERVER}" if self.shaped_by == SERVER else ""
        return LinkConfig(self.gbit_per_s).name + (A_LINK if self.parallel else of_a_server)


def wire_for(gbit_per_s: float, folder: Path, disk_gbit_per_s: float) -> TrialLink:
    """The best wire of that rate that this machine has: the kernel's where it can, else a token bucket.

    Rates beyond four fifths of what the disk gives are served from memory.
    """
    if not gbit_per_s:
        return TrialLink(0.0, NONE)
    if gbit_per_s > 0.8 * disk_gbit_per_s:
        return TrialLink(gbit_per_s, BUCKET, cold=False)
    return TrialLink(gbit_per_s, BUCKET if available(folder) else KERNEL)


def run_trials(rounds: Sequence[Sequence[TrialSpec]], wire: TrialLink, seed: int, timeout_s: float = 600.0) -> Rows:
    """The trials of each of ``rounds``, in an order drawn anew.

    Raises FirstTokenError when a trial fails, with its last line.
    """
    order = random.Random(seed)
    rows: Rows = []
    total = sum(len(specs) for specs in rounds)
    with track(total=total, desc=f"cold starts, {wire.name}", unit="trial") as bar:
        for round_, specs in enumerate(rounds):
            for spec in order.sample(list(specs), len(specs)):
                rows.append(one_trial(spec, wire, timeout_s) | {"round": round_, "seed": seed})
                bar.update()
    return rows


def one_trial(spec: TrialSpec, wire: TrialLink, timeout_s: float = 600.0, module: str = TRIAL) -> dict[str, object]:
    """One trial over ``wire``, by ``module``; its row says how cold the files were."""
    compile_modules()
    every = [path for folder in {spec.staged, spec.stock} for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    files = [path for path in every if path.suffix == ".safetensors"]
    resident = make_cold(files) if wire.cold else make_warm(files)
    if wire.cold:
        warm_libraries([path for path in every if path not in files])
    touch_memory(sum(path.stat().st_size for path in files))
    folder, bucket = Path(spec.staged), wire.gbit_per_s if wire.shaped_by == BUCKET else 0.0
    with ExitStack() as held:
        join, server = None, ""
        if wire.shaped_by == KERNEL:
            join = held.enter_context(KernelLimit(folder, wire.gbit_per_s * 1e9 / 8)).join
        elif wire.shaped_by == SERVER:
            server = held.enter_context(data_server(folder, wire.gbit_per_s))
        spec = replace(spec, gbit_per_s=bucket, server=server, spawned_s=time.monotonic())
        command = [sys.executable, "-m", module, json.dumps(asdict(spec))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, preexec_fn=join)
        except subprocess.TimeoutExpired as error:
            raise FirstTokenError(f"the cold start {spec.variant} took more than {timeout_s:g} s") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FirstTokenError(f"the cold start {spec.variant} failed: {reason}")
    return json.loads(done.stdout.strip().splitlines()[-1]) | {
        "link": wire.name,
        "gbit_per_s": wire.gbit_per_s,
        "shaped_by": wire.shaped_by,
        "cold": wire.cold,
        "resident_before_pct": None if resident is None else round(100 * resident, 1),
    }


@cache
def compile_modules() -> None:
    """Compile this project's modules, as pip does with those that it installs.

    An environment in which Python keeps no compiled modules would otherwise compile 115 of them in each trial, which
    took 0.08 s of a start of 0.66 s.
    """
    for folder in _package_folders():
        compileall.compile_dir(folder, quiet=2)


def _package_folders() -> Iterator[str]:
    for package in ("firsttoken", "firsttoken_cpu", "firsttoken_studies", "firsttoken_extras", "firsttoken_serve"):
        yield from importlib.import_module(package).__path__


def warm_libraries(others: Sequence[Path]) -> None:
    """Read ``others``, the files of this process's modules, all modules of this project and the mapped libraries into
    the page cache, and have the compiler asked once what a trial asks it, so that it is there, too.

    Where a page of the weights stays, ``make_cold`` drops those of all files. Under a limit in the kernel a trial's
    imports would then wait behind the weights: over 0.1 Gbit/s torch was there after 22 s, with the last weight, and in
    three of ten starts still when the modules were read and the libraries were not, of which 6 to 40 % were there.
    """
    modules = [*sys.modules.values()]
    names = (getattr(module, "__cached__", None) or getattr(module, "__file__", None) for module in modules)
    paths = {*others, *(Path(name) for name in names if isinstance(name, str))}
    paths |= {path for folder in _package_folders() for path in Path(folder).rglob("*.pyc")}
    maps = kernel_files.read(kernel_files.PROC / "self" / "maps").splitlines()
    paths |= {Path(line[line.index("/") :]) for line in maps if "/" in line}
    make_warm([path for path in paths if path.is_file() and resident_fraction(path) != 1])
    with suppress(OSError):  # without a compiler no trial asks one, either
        shared_library(SOURCE)


@contextmanager
def data_server(folder: Path, gbit_per_s: float) -> Iterator[str]:
    """The address of a data server with ``folder``, a process that ends with the context. Raises FirstTokenError."""
    command = [sys.executable, "-m", "firsttoken.link.data_server", str(folder), "--gbit-per-s", str(gbit_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            if not (address := server.stdout.readline().strip()):
                raise FirstTokenError(f"the data server did not start: {server.stderr.read().strip()}")
            yield address
        finally:
            server.terminate()


def link_key(row: Mapping[str, Any]) -> str:
    """Return the name of a trial's link in names of measures: "unshaped", "1gbit", "1gbit_each", "1gbit_server"."""
    rate = f"{row['gbit_per_s']:g}gbit" if row["gbit_per_s"] else "unshaped"
    name = row["link"]
    return f"{rate}_each" if name.endswith(A_LINK) else f"{rate}_server" if name.endswith(SERVER) else rate


def files_were(row: dict[str, Any]) -> str:
    """Return the state of a trial's files, as far as the system told: "cold", "in memory", or that nothing was
    verified."""
    if row["resident_before_pct"] is None:
        return f"{'cold' if row['cold'] else 'in memory'}, not verified"
    return "in memory" if row["resident_before_pct"] else "cold"


def make_cold(files: Sequence[Path]) -> float | None:
    """Drop ``files`` from the page cache; the largest share of one that is still there, None where unknown."""
    for path in files:
        evict(path)
    fractions = [resident_fraction(path) for path in files]
    return None if None in fractions else max((share for share in fractions if share is not None), default=0.0)


def make_warm(files: Sequence[Path]) -> float | None:
    """Read ``files`` into the page cache: a data server that has them in memory."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass
    fractions = [resident_fraction(path) for path in files]
    return None if None in fractions else min((share for share in fractions if share is not None), default=1.0)


def touch_memory(size: int) -> None:
    """Write to ``size`` fresh bytes and give them back.

    On a virtual machine the first touch of memory that the host has not backed yet can cost more than the disk, and
    hits loaders that allocate; after this, all find backed memory.
    """
    with mmap.mmap(-1, max(1, size)) as memory:
        memory[:: mmap.PAGESIZE] = bytes(len(range(0, len(memory), mmap.PAGESIZE)))
