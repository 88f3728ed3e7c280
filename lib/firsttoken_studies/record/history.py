"""What git's history says of the record: whether a result names a commit of it, how a claim stood at that commit, and
whether every result that was ever committed has its line in the log."""

import gzip
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any

from firsttoken.study import paths
from firsttoken_studies.record.claims import DECIDES, WORDING, Claim
from firsttoken_studies.record.code import blobs, git
from firsttoken_studies.record.record_log import Fixed, Log, LogLine, parse_log, rows_digest
from firsttoken_studies.record.results import PACKED, expanded

_RENAMED = "661ed531c"  # the commit that named measures by measure and place; all else of the claims stayed as it was
_DEFAULTS: dict[str, Any] = {"unit": "", "tolerance": 0.0, "where": {}, "whose": "report", "nature": "measured"}


def is_here() -> bool:
    """Return whether this copy has the history: a clone of this repository that is not shallow."""
    return _ran("merge-base", "--is-ancestor", _RENAMED, "HEAD")


@cache
def is_ancestor(revision: str, descendant: str = "HEAD") -> bool:
    """Return whether ``revision`` is the commit ``descendant`` or one that it comes from."""
    return _ran("merge-base", "--is-ancestor", revision.removesuffix("-dirty"), descendant)


def standing(claim: Claim, revision: str) -> tuple[Fixed, bool]:
    """Return the state of ``claim`` at ``revision`` (as ``record_log.ClaimRecord.fixed`` has it), and whether its
    wording differed.

    A claim whose tolerance was only narrowed since stands as before.
    """
    revision = revision.removesuffix("-dirty")
    if not is_ancestor(revision):
        return "unknown", False
    then, now = claims_at(revision).get(claim.id), _plain(claim)
    if then is None:
        return "after", False
    pairs = [(then, now)]
    if not is_ancestor(_RENAMED, revision):
        named, renamed = (claims_at(commit).get(claim.id) for commit in (f"{_RENAMED}^", _RENAMED))
        if named is None or renamed is None:
            return "after", False
        pairs = [(then, named), (renamed, now)]
    decided = [(_decides(before), _decides(after)) for before, after in pairs]
    worded = any(then.get(name, "") != now[name] for name in WORDING)
    if any(before[name] != after[name] for before, after in decided for name in ("measure", "where", "experiment")):
        return "other", worded
    narrower = all(after.pop("tolerance") <= before.pop("tolerance") for before, after in decided)
    return ("before" if narrower and all(before == after for before, after in decided) else "after"), worded


def faults(log: Log, claims: Sequence[Claim]) -> list[str]:
    """Return the faults of the log against the history: a line that says more of a claim than the revision of its run
    does, a run that began before its revision was committed, a committed result without a line, and a line that was
    changed."""
    by_id, messages = {claim.id: claim for claim in claims}, list[str]()
    for line in log.runs():
        messages += _false_lines(line, by_id)
    logged = {line.rows for line in log.runs()}
    for commit, path, rows in committed_runs():
        if rows not in logged:
            messages.append(f"{path} of commit {commit[:9]} has no line in {paths.RECORD_LOG.name}")
    return [*messages, *_changed_lines(log)]


def _false_lines(line: LogLine, claims: Mapping[str, Claim]) -> Iterator[str]:
    for name, answer in line.claims.items():
        if name not in claims or answer.asked != claims[name].digest[:16]:
            continue
        fixed, worded = standing(claims[name], line.revision)
        if fixed != answer.fixed:
            prefix = f"the line of {line.experiment} says {answer.fixed!r}"
            yield f"claim {name}: by revision {line.revision[:9]} it was fixed {fixed!r}, {prefix}"
        elif worded and not answer.reworded and answer.worded == claims[name].wording[:16]:
            yield f"claim {name} was worded otherwise at revision {line.revision[:9]}, which its line does not say"
    if is_ancestor(line.revision):
        made = _git("show", "-s", "--format=%cI", line.revision.removesuffix("-dirty")).strip()
        if datetime.fromisoformat(line.started) < datetime.fromisoformat(made):
            yield f"{line.experiment} began {line.started}, before its revision {line.revision[:9]} was committed"
    elif any(answer.fixed != "unknown" for answer in line.claims.values()):
        yield f"{line.experiment} names revision {line.revision[:9]}, which is not in the history"


def committed_runs() -> Iterable[tuple[str, str, str]]:
    """Return each result for the record that was ever committed: commit, path and the sha256 of its rows."""
    log = _git(
        *("log", "--format=@%H", "--no-renames", "--raw", "--no-abbrev", "--reverse", "--topo-order"),
        *("--", "data/results/*/full/*", "data/results/*/gpu/*", "data/results/*/paper/*"),
    )
    commit, runs = "", dict[str, tuple[str, str]]()
    for line in log.splitlines():
        if line.startswith("@"):
            commit = line[1:]
        elif line.startswith(":"):
            about, path = line.split("\t", 1)
            blob = about.split()[3]
            if set(blob) != {"0"} and path.endswith((".json", PACKED)):
                runs.setdefault(blob, (commit, path))
    for blob, content in zip(runs, blobs(runs), strict=True):
        commit, path = runs[blob]
        text = gzip.decompress(content) if path.endswith(PACKED) else content
        yield commit, path, rows_digest(expanded(json.loads(text))["rows"])


def _changed_lines(log: Log) -> Iterator[str]:
    """Yield a fault for each earlier log that is not the beginning of today's."""
    now = [line.text for line in log.lines]
    for commit in _git("log", "--format=%H", "--", _log_path()).split():
        then = [line.text for line in parse_log(_git("show", f"{commit}:{_log_path()}"), paths.RECORD_LOG).lines]
        if now[: len(then)] != then:
            yield f"{paths.RECORD_LOG.name} does not begin with what commit {commit[:9]} has: lines were changed"


def _log_path() -> str:
    return paths.RECORD_LOG.relative_to(paths.ROOT).as_posix()


@cache
def claims_at(commit: str) -> Mapping[str, dict[str, Any]]:
    """The claims of a commit by id, as its files have them: one file in ``data`` until each notebook had its own."""
    import yaml

    listed = _git("ls-tree", "-r", commit, "--", "data/claims.yaml", "lib/firsttoken_studies").splitlines()
    names = [line.split()[2] for line in listed if line.endswith("/claims.yaml")]
    entries = [yaml.load(content, yaml.CSafeLoader) for content in blobs(names)] if names else []
    return {entry["id"]: entry for file in entries for entry in file or []}


def _decides(entry: Mapping[str, Any]) -> dict[str, Any]:
    deciding = {name: entry.get(name, _DEFAULTS.get(name)) for name in DECIDES}
    deciding["where"] = json.loads(json.dumps(deciding["where"]))
    return deciding | {"profiles": [name for name in entry.get("profiles", []) if name != "review"]}


def _plain(claim: Claim) -> dict[str, Any]:
    return json.loads(json.dumps({name: getattr(claim, name) for name in (*DECIDES, *WORDING)}))


def _ran(*arguments: str) -> bool:
    with suppress(OSError, subprocess.CalledProcessError):
        git(*arguments)
        return True
    return False


def _git(*arguments: str) -> str:
    """Return git's output, "" where there is no git or no clone."""
    with suppress(OSError, subprocess.CalledProcessError):
        return git(*arguments).decode()
    return ""
