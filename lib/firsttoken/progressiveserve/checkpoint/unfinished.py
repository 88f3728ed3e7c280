"""A staging that was interrupted: which of its shards can be kept.

``<folder>.partial`` holds a log in JSON lines: first what is being staged, then one line for each finished shard.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from firsttoken.assets.lock import file_sha256
from firsttoken.progressiveserve.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    PartFile,
    StageFiles,
    check_files,
    check_side,
    read_manifest,
)
from firsttoken.study.errors import ModelError, StageError
from firsttoken.study.files import write_text
from firsttoken.study.foreign.json_text import parse_json, read_json
from firsttoken.study.foreign.schema import shaped

LOG = "staging.jsonl"
INDEX = "model.safetensors.index.json"
_BEFORE = "firsttoken-staged-1"


def already_there(folder: Path, partial: Path, identity: str) -> Manifest | None:
    """The manifest of a finished staging, None where there is none; a damaged one becomes ``partial`` again.

    So does one of the format before this, which had no hash of config.json: its shards are the same. Raises StageError
    when ``folder`` holds anything but this staging.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        manifest = read_manifest(folder)
        of, stages = manifest.plan_sha256, manifest.stages
    except ModelError as error:
        manifest, (of, stages) = None, _before(folder, error)
    if of != identity:
        raise StageError(f"{folder} holds another plan, model or adapter: remove it or choose another folder")
    try:
        if manifest:
            check_files(folder, manifest)
            check_side(folder, manifest)
            if (folder / INDEX).is_file() or manifest.in_planes:
                (folder / LOG).unlink(missing_ok=True)  # left by a kill between the rename and its removal
                return manifest
    except ModelError:
        pass
    _write_log(folder, identity, [part for stage in stages for part in stage.parts])
    shutil.rmtree(partial, ignore_errors=True)
    folder.rename(partial)
    return None


def resume(partial: Path, identity: str) -> dict[str, PartFile]:
    """The shards in ``partial`` that are finished and intact, by file; everything else in it is removed.

    Raises StageError when the folder was not begun by staging.
    """
    log = partial / LOG
    if not log.is_file() and partial.exists() and any(partial.iterdir()):
        raise StageError(f"{partial} is there and was not begun by staging: remove it or choose another folder")
    head, *lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else [""]
    if head != _head(identity):
        shutil.rmtree(partial, ignore_errors=True)
        lines = []
    partial.mkdir(parents=True, exist_ok=True)
    finished: dict[str, PartFile] = {}
    for line in lines:
        try:
            part = shaped(PartFile, parse_json(line))
        except ValueError:  # the line that was being written when the process was killed
            break
        if (partial / part.file).is_file() and file_sha256(partial / part.file) == part.sha256:
            finished[part.file] = part
    for path in partial.rglob("*"):
        if path.is_file() and path != log and path.relative_to(partial).as_posix() not in finished:
            path.unlink()
    _write_log(partial, identity, finished.values())
    return finished


def log_line(part: PartFile) -> str:
    """What the log says of a finished shard."""
    return json.dumps(asdict(part)) + "\n"


def _before(folder: Path, reason: ModelError) -> tuple[str, tuple[StageFiles, ...]]:
    """plan_sha256 and stages of a manifest of the format before this one. Raises StageError for any other."""
    with suppress(OSError, ValueError):
        content = read_json(folder / MANIFEST)
        if isinstance(content, dict) and content.get("format") == _BEFORE:
            old = shaped(_Before, content, others=True)
            return old.plan_sha256, old.stages
    raise StageError(f"{folder} is no staged checkpoint: remove it or choose another folder ({reason})") from reason


@dataclass(frozen=True)
class _Before:
    plan_sha256: str
    stages: tuple[StageFiles, ...]


def _head(identity: str) -> str:
    return json.dumps({"plan_sha256": identity})


def _write_log(folder: Path, identity: str, parts: Iterable[PartFile]) -> None:
    write_text(folder / LOG, _head(identity) + "\n" + "".join(log_line(part) for part in parts))
