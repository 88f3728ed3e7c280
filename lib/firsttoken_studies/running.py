"""The notebooks one after another: how long they take by the record, what fails, and the minutes of a whole run."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from firsttoken.study import paths, storage
from firsttoken.study.errors import NotebookError
from firsttoken.study.machine import describe, machine_slug
from firsttoken.study.profile import Profile
from firsttoken.study.progress import span
from firsttoken.study.summary import Summary
from firsttoken.study.system.alone import alone
from firsttoken_studies.record import kernel_forkserver
from firsttoken_studies.record.notebooks import notebook_paths, publish, run_notebook
from firsttoken_studies.record.results import Result, git_revision, load_result, write_result

RUN = "run"  # the experiment that holds the seconds of each notebook


def run_notebooks(notebooks: Sequence[Path], profile: Profile, *, published: bool) -> int:
    """Run ``notebooks`` in order and return the number that failed; one that fails does not keep the others from
    running.

    Their output goes into the repository's copies where it is to be ``published``. Of several runs that write into the
    same folders one goes on, and the others wait. A run of all notebooks is recorded.

    Raises StorageError when their output cannot be kept.
    """
    if published:
        os.environ[paths.PUBLISHES] = "1"  # heard by the notebooks' processes
    for folder in (paths.EXECUTED, paths.RESULTS, paths.own_figures(), paths.CACHE):
        storage.check(folder)
    with alone(paths.EXECUTED / ".lock", f"runs notebooks whose results go to {paths.OUT}"):
        return _run_alone(notebooks, profile, published=published)


def _run_alone(notebooks: Sequence[Path], profile: Profile, *, published: bool) -> int:
    seconds, started = dict[str, float](), datetime.now(UTC)
    print(f"{machine_slug()}, profile {profile.name}, {profile.dtype_name}\n{minutes_text(notebooks, profile)}\n")
    with kernel_forkserver.warmed():
        for path in notebooks:
            print(f"{path.stem:<40} ", end="", flush=True)
            try:
                took_s = run_notebook(path, profile.name)
                print(f"{took_s:6.1f} s", flush=True)
                if published:
                    publish(path, profile.name)
                seconds[path.stem] = took_s
            except NotebookError as error:
                print(f"failed\n{error}", flush=True)
    if len(seconds) == len(notebook_paths()):
        _record(profile, seconds, started)
    return len(notebooks) - len(seconds)


def minutes_text(notebooks: Sequence[Path], profile: Profile) -> str:
    """Return the number of ``notebooks`` and the minutes that they took in the last whole run on this machine,
    else in one that is recorded; a notebook that did not run there counts as the median of the others."""
    count = f"{len(notebooks)} notebook{'s' * (len(notebooks) != 1)}"
    record = load_result(RUN, profile.name) or load_result(RUN, profile.name, machine="any")
    if record is None:
        return f"{count}; no record has their minutes (quick: some 20, review: one to three hours, full: many)"
    seconds = {row["notebook"]: row["seconds"] for row in record.rows}
    total_s = sum(seconds.get(path.stem, statistics.median(seconds.values())) for path in notebooks)
    least = "about" if all(path.stem in seconds for path in notebooks) else "at least"
    return f"{count}, {least} {span(total_s)} by the record of {record.slug}"


def _record(profile: Profile, seconds: Mapping[str, float], started: datetime) -> None:
    """Write the minutes of a whole run as a result of the experiment "run"."""
    total_s, summary = sum(seconds.values()), Summary()
    summary.add("total", {"value": round(total_s / 60, 2), "n": 1, "unit": "min"})
    write_result(
        Result(
            experiment=RUN,
            profile=profile.name,
            parameters=profile.parameters(),
            machine=describe(),
            provenance={"source": "seconds of each notebook, its start included", "kind": "real"},
            git_revision=git_revision(),
            seeds=[profile.seed],
            started=started.isoformat(timespec="seconds"),
            entries={},
            duration_s=round(total_s, 3),
            rows=[{"notebook": stem, "seconds": round(value, 1)} for stem, value in seconds.items()],
            floors={},
            summary=summary,
        )
    )
