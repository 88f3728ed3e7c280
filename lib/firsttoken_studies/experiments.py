"""The one way to run an experiment."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from firsttoken.study import paths, progress, storage
from firsttoken.study.errors import ProfileError
from firsttoken.study.machine import cores, describe
from firsttoken.study.profile import Profile
from firsttoken.study.timing import count_resumed
from firsttoken_studies import ledger
from firsttoken_studies.record import code, show
from firsttoken_studies.record.cell_mechanism import is_changed, taken
from firsttoken_studies.record.claims import digests, load_claims
from firsttoken_studies.record.experiment import EVERY_PROFILE, LONG, Experiment
from firsttoken_studies.record.results import Outcome, Result, git_revision, is_clean, load_result, write_result
from firsttoken_studies.registry import EXPERIMENTS, find_experiment


def run_experiment(name: str, profile: Profile, because: str = "", **mechanisms: Any) -> Result:
    """Run an experiment, seeded and timed, write its result and return it.

    ``mechanisms`` are a notebook's classes or functions by the name under which the study takes them. Where its cell is
    another than the published one the study runs once more, with these in place of the library's, and the result has
    that run as ``with_mechanism``: figures show it beside the library's. It is neither written nor recorded.

    The results that it reads are measured first where this machine has none under these settings. The seeds recorded
    are those in a ``seed`` column of the rows, else the profile's. A run for the record becomes a line of the log, with
    ``because`` as the reason for measuring again.

    Raises ProfileError when the experiment does not exist, is not meant for the profile or takes no such mechanism, or
    when a result for the record would name no commit, MechanismError when the reader's does not work, ClaimsError when
    the ledger cannot be read, StorageError when the disk takes no result, and what the experiment raises.
    """
    experiment = find_experiment(name)
    taken(name, experiment.function, mechanisms)
    if profile.name in EVERY_PROFILE and profile.name not in experiment.profiles:
        raise ProfileError(f"{name} is not for profile {profile.name}; use {' or '.join(experiment.profiles)}")
    revision, entries = git_revision(), digests(load_claims(paths.STUDIES, EXPERIMENTS), name)
    if profile.name in LONG and paths.RESULTS == paths.RECORDED and not is_clean(revision):
        raise ProfileError(
            f"{name} under profile {profile.name} is for the record, and the code is not that of a commit "
            f"({revision}); commit it, or let FIRSTTOKEN_OUT name another folder for results"
        )
    digest = code.digest(experiment.module)
    read = [kept_result(source, profile) or run_experiment(source, profile) for source in experiment.reads]
    started = datetime.now(UTC)
    storage.check(paths.RESULTS)
    with storage.storing(paths.CACHE), progress.running(name, _usual_s(name, profile)):
        outcome, seconds = _seeded(experiment, profile, read)
    parameters = profile.parameters()
    result = Result(
        experiment=name,
        profile=profile.name,
        parameters=parameters,
        machine=describe(),
        provenance=outcome.provenance,
        git_revision=revision,
        seeds=sorted({row["seed"] for row in outcome.rows if "seed" in row}) or [profile.seed],
        started=started.isoformat(timespec="seconds"),
        duration_s=seconds,
        entries=entries,
        rows=outcome.rows,
        floors=outcome.floors,
        summary=experiment.summarise(outcome.rows, parameters),
        code=digest,
    )
    write_result(result)
    if profile.name in LONG and paths.RESULTS == paths.RECORDED:
        ledger.note_run(result, because)
    if any(map(is_changed, mechanisms.values())):
        with show.attempt(f"{', '.join(mechanisms)} of the cell `mechanism`"):
            object.__setattr__(result, "with_mechanism", _with(mechanisms, experiment, profile, read, result))
    return result


def _seeded(
    experiment: Experiment, profile: Profile, read: Sequence[Result], mechanisms: Mapping[str, Any] | None = None
) -> tuple[Outcome, float]:
    """Run the study from the profile's seed, and return its outcome and the seconds that it took."""
    profile.used.clear()
    random.seed(profile.seed)
    np.random.seed(profile.seed)
    torch.manual_seed(profile.seed)
    torch.set_num_threads(profile.threads or cores())
    clock = time.perf_counter()
    with count_resumed() as cached_count:
        outcome = experiment(profile, *read, **(mechanisms or {}))
    return outcome, round(time.perf_counter() - clock + sum(cached_count), 3)


def _with(
    mechanisms: Mapping[str, Any], experiment: Experiment, profile: Profile, read: Sequence[Result], library: Result
) -> Result:
    """Run the study with the reader's ``mechanisms``; what says how ``library`` came about holds of it, too."""
    print(f"The cell `mechanism` was changed: {experiment.name} runs again with its {', '.join(mechanisms)}.")
    with progress.running(f"{experiment.name}, your mechanism", library.duration_s):
        outcome, seconds = _seeded(experiment, profile, read, mechanisms)
    summary = experiment.summarise(outcome.rows, library.parameters)
    return replace(library, rows=outcome.rows, floors=outcome.floors, summary=summary, duration_s=seconds)


def _usual_s(name: str, profile: Profile) -> float | None:
    """Return the seconds that this experiment took here under this profile the last time; None where it never did."""
    before = load_result(name, profile.name)
    return before.duration_s if before else None


def kept_result(experiment: str, profile: Profile) -> Result | None:
    """Return this machine's result of ``experiment`` under ``profile``, for another experiment that reads it.

    Returns None where there is none, or where it was measured under other settings than those that hold now. Raises
    FirstTokenError for a result that cannot be read.
    """
    now: dict[str, Any] = {"model": profile.model, "dtype": profile.dtype_name, "threads": profile.threads}
    now |= profile.sections
    result = load_result(experiment, profile.name)
    if result is None or any(_differ(now[key], then) for key, then in result.parameters.items() if key in now):
        return None
    return result


def _differ(now: Any, then: Any) -> bool:
    """Return whether a setting, or any key of a section, differs; a section's defaults are not in the profile."""
    if isinstance(then, dict):
        return any(then.get(key) != value for key, value in now.items())
    return now != then
