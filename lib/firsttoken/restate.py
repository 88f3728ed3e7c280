"""Results of schema 2, whose summaries had one name an entry, as schema 3 has them: by measure and place.

    python -m firsttoken.restate FORMER

FORMER is a checkout of the last revision of schema 2. A result is restated only where the summary that this code makes
of its rows has the former code's entries, value by value and in their order; so each former name has one measure and
place. The digest of a claim goes over where the entry is the former one but for these names, and stays where it is not,
so that what was *post hoc* remains it. The former code put two or three entries of `cold_start` and
`refinement_under_load` in the order of a set, which PYTHONHASHSEED decides: where it is another, nothing is written.
Every result says which revision restated it, and the sha256 that it had before.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from firsttoken.registry import EXPERIMENTS
from firsttoken.study import paths
from firsttoken.study.claims import digest, load_claims
from firsttoken.study.content import sha256_of
from firsttoken.study.foreign.json_text import read_json
from firsttoken.study.foreign.yaml_text import read_entries
from firsttoken.study.measures import Summary, named
from firsttoken.study.record import Result, git_revision, is_clean, write_result

_SUMMARIES = """
import json, sys
from pathlib import Path
from firsttoken.registry import EXPERIMENTS
from firsttoken.study.record import read_result
made = {}
for path in map(Path, sys.argv[1:]):
    result = read_result(path)
    known = EXPERIMENTS.get(result.experiment)
    names = known.summarise(result.rows, result.parameters) if known else result.summary
    made[str(path)] = list(names)
print(json.dumps(made))
"""

Place = tuple[str, dict[str, Any]]  # a measure and where it holds


def main(former: Path) -> None:
    """Restate every result of schema 2 in this checkout, or stop at the first that says something else."""
    revision = git_revision()
    if not is_clean(revision):
        sys.exit(f"the code is not that of a commit ({revision})")
    results = {path: content for path in sorted(paths.RECORDED.glob("*/*/*.json")) if (content := _of_schema_2(path))}
    names = _former_names(former, results)
    places: dict[str, dict[str, Place]] = {}
    summaries = {path: _summary(path, content, names[str(path)], places) for path, content in results.items()}
    renamed = _renamed_claims(former, places)
    for path, content in results.items():
        was = content.pop("sha256")
        content["entries"] = {name: renamed.get((name, kept), kept) for name, kept in content["entries"].items()}
        content["provenance"]["restated"] = {"revision": revision, "from_schema": 2, "from_sha256": was}
        content["summary"] = summaries[path]
        write_result(Result(**content))
        print(path.relative_to(paths.RECORDED))


def _of_schema_2(path: Path) -> dict[str, Any] | None:
    content = read_json(path)
    if content.pop("schema") != 2:
        return None
    if content["sha256"] != sha256_of({"schema": 2} | {k: v for k, v in content.items() if k != "sha256"}):
        sys.exit(f"{path} was edited")
    return content


def _former_names(former: Path, files: dict[Path, Any]) -> dict[str, list[str]]:
    """Of each result the names that the former code gives its summary, in order."""
    surroundings = os.environ | {"PYTHONPATH": str(former / "lib")}
    command = [sys.executable, "-c", _SUMMARIES, *map(str, files)]
    told = subprocess.run(command, cwd=former, env=surroundings, check=True, capture_output=True, text=True)
    return json.loads(told.stdout)


def _summary(path: Path, content: dict[str, Any], names: list[str], places: dict[str, dict[str, Place]]) -> Summary:
    """The summary by this code; notes in ``places`` what each former name is now."""
    name, kept = content["experiment"], content["summary"]
    if name in EXPERIMENTS:
        made = EXPERIMENTS[name].summarise(content["rows"], content["parameters"])
        plain = json.loads(json.dumps(made, default=lambda value: value.item()))
    else:  # the minutes of a run, which are no experiment's
        plain = [{"measure": former, "where": {}} | kept[former] for former in names]
    if len(plain) != len(names) or set(names) != kept.keys():
        sys.exit(f"{path}: {len(kept)} entries, {len(plain)} now")
    for former, entry in zip(names, plain, strict=True):
        values = {key: value for key, value in entry.items() if key not in ("measure", "where")}
        if not _same(values, kept[former]):
            sys.exit(f"{path}: {former} {kept[former]} would be {named(entry['measure'], entry['where'])} {values}")
        place = (entry["measure"], entry["where"])
        if places.setdefault(name, {}).setdefault(former, place) != place:
            sys.exit(f"{path}: {former} has two places")
    return Summary(
        kept[former] | {key: entry[key] for key in ("measure", "where")}
        for former, entry in zip(names, plain, strict=True)
    )


def _same(made: dict[str, Any], kept: dict[str, Any]) -> bool:
    return made.keys() == kept.keys() and all(_equal(made[key], kept[key]) for key in kept)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, str | bool) or isinstance(other, str | bool):
        return one == other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)


def _renamed_claims(former: Path, places: dict[str, dict[str, Place]]) -> dict[tuple[str, str], str]:
    """By id and former digest the present digest of each claim that differs from its former entry in names alone."""
    before = {entry["id"]: entry for _, entry in read_entries(former / "data" / "claims.yaml")}
    renamed = {}
    for claim in load_claims(paths.CLAIMS, EXPERIMENTS):
        entry = before.get(claim.id)
        if entry is None or entry["experiment"] != claim.experiment:
            continue
        asked = entry["measure"] if isinstance(entry["measure"], list) else [entry["measure"]]
        known = places.get(claim.experiment, {})
        if [known.get(name) for name in asked] != [(claim.measure, where) for where in claim.places]:
            continue
        deciding = claim.deciding
        del deciding["where"]
        deciding["measure"] = tuple(asked) if isinstance(entry["measure"], list) else asked[0]
        renamed[claim.id, digest(deciding)] = claim.digest
    return renamed


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
