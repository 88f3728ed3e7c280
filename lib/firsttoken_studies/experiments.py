"""The one way to run an experiment."""

from __future__ import annotations

import random
import time
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
from firsttoken_studies.record import code
from firsttoken_studies.record.claims import digests, load_claims
from firsttoken_studies.record.experiment import EVERY_PROFILE, LONG
from firsttoken_studies.record.results import Result, git_revision, is_clean, load_result, write_result
from firsttoken_studies.registry import EXPERIMENTS, find_experiment


def run_experiment(name: str, profile: Profile, because: str = "") -> Result:
    """Run an experiment, seeded and timed, write its result and return it.

    The results that it reads are measured first where this machine has none under these settings. The seeds recorded
    are those in a ``seed`` column of the rows, else the profile's. A run for the record becomes a line of the log, with
    ``because`` as the reason for measuring again.

    Raises ProfileError when the experiment does not exist or is not meant for the profile, or when a result for the
    record would name no commit, ClaimsError when the ledger cannot be read, StorageError when the disk takes no result,
    and what the experiment raises.
    """
    experiment = find_experiment(name)
    if profile.name in EVERY_PROFILE and profile.name not in experiment.profiles:
        raise ProfileError(f"{name} is not for profile {profile.name}; use {' or '.join(experiment.profiles)}")
    revision, entries = git_revision(), digests(load_claims(paths.CLAIMS, EXPERIMENTS), name)
    if profile.name in LONG and paths.RESULTS == paths.RECORDED and not is_clean(revision):
        raise ProfileError(
            f"{name} under profile {profile.name} is for the record, and the code is not that of a commit "
            f"({revision}); commit it, or let FIRSTTOKEN_OUT name another folder for results"
        )
    digest = code.digest(experiment.module)
    read = [kept_result(source, profile) or run_experiment(source, profile) for source in experiment.reads]
    profile.used.clear()
    random.seed(profile.seed)
    np.random.seed(profile.seed)
    torch.manual_seed(profile.seed)
    torch.set_num_threads(profile.threads or cores())
    started, clock = datetime.now(UTC), time.perf_counter()
    storage.check(paths.RESULTS)
    with storage.storing(paths.CACHE), count_resumed() as cached_count, progress.running(name, _usual_s(name, profile)):
        outcome = experiment(profile, *read)
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
        duration_s=round(time.perf_counter() - clock + sum(cached_count), 3),
        entries=entries,
        rows=outcome.rows,
        floors=outcome.floors,
        summary=experiment.summarise(outcome.rows, parameters),
        code=digest,
    )
    write_result(result)
    if profile.name in LONG and paths.RESULTS == paths.RECORDED:
        ledger.note_run(result, because)
    return result


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
