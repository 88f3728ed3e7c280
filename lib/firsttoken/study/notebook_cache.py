"""A run of the notebooks: what is kept from the last one, and how long the rest will take.

A notebook that ran with the same code, profile, data, packages and processor is not run again. Its minutes are those of
the last run here, else those of a recorded run, stretched by how much slower this processor multiplies.
"""

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from firsttoken.study import dtypes, paths
from firsttoken.study.files import write_text
from firsttoken.study.machine import cores, describe, identity, machine_slug
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.schema import shaped
from firsttoken.study.profile import Profile
from firsttoken.study.record import Result, git_revision, load_result, write_result
from firsttoken.study.storage import storing
from firsttoken.study.summary import Summary

RUN = "run"  # the experiment that holds the seconds of each notebook
SLOWER = 1.5  # times the recorded run: from here on a run says that it will be slow
_FIGURE = re.compile(r'plot\.save\(fig, \\?"([\w-]+)\\?"')


@dataclass(frozen=True)
class Expected:
    """Seconds here by notebook (its file's stem), by what factor this machine is slower than where they were measured,
    and whose they are."""

    seconds: Mapping[str, float]
    slower: float = 1.0
    source: str = ""

    def of(self, notebooks: Iterable[Path]) -> float | None:
        """Seconds that ``notebooks`` will take here, those of which nothing is recorded by the median of the others;
        None where nothing is recorded at all."""
        if not self.seconds:
            return None
        usual = statistics.median(self.seconds.values())
        return sum(self.seconds.get(path.stem, usual) for path in notebooks)

    def records(self, notebooks: Iterable[Path]) -> bool:
        """Whether each of ``notebooks`` has run where these seconds are from."""
        return self.seconds.keys() >= {path.stem for path in notebooks}


def expected(profile: Profile) -> Expected:
    """Return the minutes of ``profile``: of this machine, and of what has not run here those of the latest recorded
    run of another."""
    latest = {stem: stamp["seconds"] for stem, stamp in _stamps(profile.name).items()}
    recorded = load_result(RUN, profile.name) or load_result(RUN, profile.name, machine="any")
    rows = {row["notebook"]: row["seconds"] for row in recorded.rows} if recorded is not None else {}
    if latest.keys() >= rows.keys():
        return Expected(latest, source="the last run here")
    slower = max(1.0, recorded.summary.value("products") / products_gflop_per_s(profile))
    seconds = {stem: slower * took for stem, took in rows.items()} | latest
    return Expected(seconds, slower, f"the run recorded on {recorded.slug}{' and the last one here' * bool(latest)}")


def products_gflop_per_s(profile: Profile) -> float:
    """GFLOP/s of matrix products in the dtype that ``profile`` computes in, all cores of the CPU together."""
    rates = dtypes.cpu_rates()
    return cores() * (rates.bfloat16 if profile.dtype_name == "bfloat16" else rates.float32)


def is_kept(path: Path, profile: Profile) -> dict[str, Any] | None:
    """The stamp of a notebook that need not run again: its copy and figures are there, nothing changed. Else None."""
    stamp = _stamps(profile.name).get(path.stem)
    there = [paths.EXECUTED / profile.name / path.name, *figures_of(path)]
    same = stamp and stamp["fingerprint"] == fingerprint(path, profile) and all(file.exists() for file in there)
    return stamp if same else None


def keep(path: Path, profile: Profile, seconds: float) -> None:
    """Remember that a notebook ran just now."""
    at = datetime.now(UTC).isoformat(timespec="minutes")
    stamp = {"fingerprint": fingerprint(path, profile), "seconds": round(seconds, 1), "at": at}
    text = json.dumps(_stamps(profile.name) | {path.stem: stamp}, indent=1)
    with storing(paths.EXECUTED):
        write_text(_stamp_file(profile.name), text + "\n")


def figures_of(path: Path) -> list[Path]:
    """The figures that a notebook saves."""
    names = _FIGURE.findall(path.read_text(encoding="utf-8"))
    return [paths.own_figures() / f"{name}.png" for name in names]


def fingerprint(path: Path, profile: Profile) -> str:
    """A sha256 of all that the outcome of a notebook hangs on: its cells, the library, the profiles (one may be
    like another), every file of data that is not this profile's own result here, the packages and the processor.

    The last notebook has no experiment of its own and reads what the others wrote, so for it those count as well.
    """
    own = paths.RESULTS / machine_slug() / profile.name
    reads_others = 'run_experiment("' not in path.read_text(encoding="utf-8").replace('\\"', '"')
    library = Path(dtypes.__file__).parents[2]
    packages = [package for package in library.glob("firsttoken*") if package.is_dir()]
    files = [path, *paths.PROFILES.glob("*.yaml")]
    files += [file for package in packages for kind in ("*.py", "*.cpp") for file in package.rglob(kind)]
    data = {file for folder in (paths.DATA, paths.RESULTS) for file in folder.rglob("*")}
    counted = (file for file in data if file.is_file() and file.name != f"{RUN}.json")
    files += [file for file in counted if reads_others or own not in file.parents]
    digest = hashlib.sha256(json.dumps([identity(), describe()["packages"]]).encode())
    for file in sorted(files):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def record(profile: Profile, seconds: Mapping[str, float], started: datetime) -> None:
    """Write the minutes of a whole run as a result of the experiment "run"."""
    total, summary = sum(seconds.values()), Summary()
    summary.add("total", {"value": round(total / 60, 2), "n": 1, "unit": "min"})
    summary.add("products", {"value": round(products_gflop_per_s(profile), 1), "n": 1, "unit": "GFLOP/s"})
    write_result(
        Result(
            experiment=RUN,
            profile=profile.name,
            parameters=profile.parameters(),
            machine=describe(),
            provenance={
                "source": "seconds of each notebook as it last ran with this code, its start included",
                "kind": "real",
            },
            git_revision=git_revision(),
            seeds=[profile.seed],
            started=started.isoformat(timespec="seconds"),
            entries={},
            duration_s=round(total, 3),
            rows=[{"notebook": stem, "seconds": round(value, 1)} for stem, value in seconds.items()],
            floors={},
            summary=summary,
        )
    )


@dataclass(frozen=True)
class _Stamp:
    fingerprint: str
    seconds: float
    at: str


def _stamp_file(profile: str) -> Path:
    return paths.EXECUTED / profile / "kept.json"


def _stamps(profile: str) -> dict[str, dict[str, Any]]:
    with suppress(OSError, ValueError):
        kept = shaped(dict[str, _Stamp], read_json(_stamp_file(profile)))
        return {stem: vars(stamp) for stem, stamp in kept.items()}
    return {}
