"""The notebooks one after another: what is expected, what is left, what may be kept; and the table at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from firsttoken.study import kernel_forkserver, notebook_cache, paths, storage
from firsttoken.study.errors import NotebookError
from firsttoken.study.machine import machine_slug
from firsttoken.study.notebooks import notebook_paths, publish, run_notebook
from firsttoken.study.profile import Profile
from firsttoken.study.system.alone import alone


@dataclass(frozen=True)
class Ran:
    """How many notebooks failed, and how many were kept from before."""

    failed: int
    kept: int


def run_notebooks(notebooks: Sequence[Path], profile: Profile, *, again: bool, published: bool) -> Ran:
    """Run ``notebooks`` in order, put what they show into the repository's copies where that is to be ``published``; a
    failing one does not keep the others from running.

    Of several runs that write into the same folders one goes on, and the others wait. A run of all is recorded, with
    the seconds that those which were kept took when they ran.

    Raises StorageError when what they write cannot be kept.
    """
    if published:
        os.environ[paths.PUBLISHES] = "1"  # heard by the notebooks' processes
    for folder in (paths.EXECUTED, paths.RESULTS, paths.own_figures(), paths.CACHE):
        storage.check(folder)
    with alone(paths.EXECUTED / ".lock", f"runs notebooks whose results go to {paths.OUT}"):
        return _run_alone(notebooks, profile, again=again, published=published)


def _run_alone(notebooks: Sequence[Path], profile: Profile, *, again: bool, published: bool) -> Ran:
    left, seconds, failed, kept, started = list(notebooks), dict[str, float](), 0, 0, datetime.now(UTC)
    expected = notebook_cache.expected(profile)
    _announce(notebooks, profile, expected)
    with kernel_forkserver.warmed():
        for path in notebooks:
            print(f"{path.stem:<40} ", end="", flush=True)
            left.remove(path)
            try:
                if not again and (stamp := notebook_cache.is_kept(path, profile)):
                    print(f"kept, ran {stamp['at']} in {stamp['seconds']:.0f} s", flush=True)
                    seconds[path.stem], kept = stamp["seconds"], kept + 1
                else:
                    seconds[path.stem] = run_notebook(path, profile.name)
                    notebook_cache.keep(path, profile, seconds[path.stem])
                    rest = expected.of(left)
                    print(
                        f"{seconds[path.stem]:6.1f} s" + (f"   about {_minutes(rest)} left" if rest else ""), flush=True
                    )
                if published:
                    publish(path, profile.name)
            except NotebookError as error:
                failed += 1
                print(f"failed\n{error}", flush=True)
    if len(seconds) == len(notebook_paths()) > kept:
        notebook_cache.record(profile, seconds, started)
    return Ran(failed, kept)


def _announce(notebooks: Sequence[Path], profile: Profile, expected: notebook_cache.Expected) -> None:
    """Say what computes and how long it will take, before it begins."""
    print(f"{machine_slug()}, profile {profile.name}, {profile.dtype_name}")
    whole = expected.of(notebooks)
    if whole is None:
        print("no record of how long these notebooks take; quick takes minutes, review one to three hours, full many\n")
        return
    least = "" if expected.records(notebooks) else "at least "
    print(f"expected, if all must run: {least}{_minutes(whole)}, by {expected.source}")
    if expected.slower >= notebook_cache.SLOWER:
        print(f"firsttoken: this processor multiplies {expected.slower:.1f} times slower than that; what to expect:")
        for path in notebooks:
            print(f"  {path.stem:<40} {_minutes(expected.of([path]) or 0.0)}")
    print()


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
