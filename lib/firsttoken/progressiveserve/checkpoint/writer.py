"""Write a staged checkpoint: one safetensors file a part, a manifest, and the index that stock transformers reads.

Staging a large model takes minutes, so an interruption costs one shard at most: everything is built in
``<folder>.partial``, and the folder takes its name when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from firsttoken.assets.lock import file_sha256
from firsttoken.progressiveserve.checkpoint.manifest import (
    MANIFEST,
    AdapterFiles,
    FileEntry,
    Manifest,
    PartFile,
    StageFiles,
    adapter_folder,
    check_complete,
    check_files,
    check_layout,
    check_side,
    part_file,
    read_manifest,
    write_manifest,
)
from firsttoken.progressiveserve.checkpoint.names import DTYPES, torch_dtype
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Part, TensorSource
from firsttoken.progressiveserve.stage_adapters import check_fit
from firsttoken.study.errors import ModelError, StageError, first_line
from firsttoken.study.files import replacing, write_text
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.safetensors_header import read_header
from firsttoken.study.parsing.schema import parse_as
from firsttoken.study.progress import track

# A staging that was interrupted: which of its shards can be kept.
#
# ``<folder>.partial`` holds a log in JSON lines: first what is being staged, then one line for each finished shard.

LOG = "staging.jsonl"
INDEX = "model.safetensors.index.json"


def finished_staging(folder: Path, partial: Path, identity: str) -> Manifest | None:
    """The manifest of a finished staging, None where there is none; a damaged one becomes ``partial`` again.

    Raises StageError when ``folder`` holds anything but this staging.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        manifest = read_manifest(folder)
    except ModelError as error:
        raise StageError(f"{folder} is no staged checkpoint: remove it or choose another folder ({error})") from error
    if manifest.plan_sha256 != identity:
        raise StageError(f"{folder} holds another plan, model or adapter: remove it or choose another folder")
    with suppress(ModelError):
        check_files(folder, manifest)
        check_side(folder, manifest)
        if (folder / INDEX).is_file() or manifest.formats:
            (folder / LOG).unlink(missing_ok=True)  # left by a kill between the rename and its removal
            return manifest
    _write_log(folder, identity, [part for stage in manifest.stages for part in stage.parts])
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
            part = parse_as(PartFile, parse_json(line))
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
    """The line of the log about a finished shard."""
    return json.dumps(asdict(part)) + "\n"


def _head(identity: str) -> str:
    return json.dumps({"plan_sha256": identity})


def _write_log(folder: Path, identity: str, parts: Iterable[PartFile]) -> None:
    write_text(folder / LOG, _head(identity) + "\n" + "".join(log_line(part) for part in parts))


def write_staged(
    source: TensorSource, plan: LoadPlan, folder: Path, adapters: Mapping[int, Path] | None = None
) -> Manifest:
    """Write the tensors of ``source`` to ``folder`` in the order of ``plan``; progress goes to stderr.

    ``adapters`` maps a stage (1-based) to the PEFT folder that belongs to the model as of that stage, which was trained
    on the source's weights. A folder that holds this staging already is returned as it is, or mended where a file is
    missing or truncated; a ``<folder>.partial`` of the same staging is continued. Raises StageError when the plan does
    not fit the model or an adapter its stage, when ``folder`` holds something else, and when it cannot be written,
    above all on a full disk.
    """
    plan.check(source.names)
    if not folder.absolute().name:
        raise StageError(f"{folder} cannot be a staged checkpoint: name a folder to write")
    folder = folder.absolute()
    adapters = adapters or {}
    for number, adapter in adapters.items():
        if not 1 <= number <= len(plan.stages):
            raise StageError(f"adapter {adapter.name} is for stage {number} of {len(plan.stages)}: choose one of these")
        check_fit(adapter, plan.layers(number), source.provenance.sha256)
    partial = folder.with_name(f"{folder.name}.partial")
    parts = {
        part_file(number, stage.name, index, part.name): part
        for number, stage in enumerate(plan.stages, start=1)
        for index, part in enumerate(stage.parts)
    }
    sizes = {file: _payload(part, source) for file, part in parts.items()}
    missing = sum(sizes.values()) + sum(f.stat().st_size for adapter in adapters.values() for f in _files_of(adapter))
    try:
        identity = _identity(source, plan, adapters)
        if (manifest := finished_staging(folder, partial, identity)) is not None:
            return manifest
        finished = resume(partial, identity)
        missing -= sum(sizes[file] for file in finished)
        if shutil.disk_usage(partial).free < missing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        label = {"desc": f"staging {folder.name}", "unit": "B"}
        with track(total=sum(sizes.values()), **label) as bar, (partial / LOG).open("a", encoding="utf-8") as log:
            for file, part in parts.items():
                if file not in finished:
                    finished[file] = _write_part(source, part, partial, file)
                    print(log_line(finished[file]), end="", file=log, flush=True)
                    missing -= sizes[file]
                bar.update(sizes[file])
        manifest = _complete(source, plan, adapters, partial, (finished[file] for file in parts), identity)
        partial.rename(folder)
        (folder / LOG).unlink()
    except (OSError, SafetensorError) as error:
        raise _write_error(error, folder, missing) from error
    return manifest


def _identity(source: TensorSource, plan: LoadPlan, adapters: Mapping[int, Path]) -> str:
    """A sha256 that is the same when the same tensors would be written to the same files."""
    content = [
        _hashed(plan),
        source.provenance.sha256 or source.provenance.source,
        [str(source.dtype(name)) for name in source.names],
        {number: [[f.name, file_sha256(f)] for f in _files_of(adapters[number])] for number in sorted(adapters)},
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _hashed(plan: LoadPlan) -> dict[str, Any]:
    """``plan`` for its hash, which it has always had: what a part's coding says stands beside the rest."""
    content = asdict(plan)
    for part in (part for stage in content["stages"] for part in stage["parts"]):
        part |= part.pop("coding") or {}
    return content


def _write_part(source: TensorSource, part: Part, folder: Path, file: str) -> PartFile:
    stored = torch_dtype(part.dtype) if part.dtype else None
    path, kind, content = folder / file, "", {}
    if part.coding:
        tensors, content = part.coding.encoded(source, part)
        kind = part.coding.format
    else:
        tensors = {name: source.get(name).to("cpu", stored).contiguous() for name in part.tensors}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    written = read_header(path).tensors
    entries = written if kind else {name: written[name] for name in part.tensors}
    size, sha256 = path.stat().st_size, file_sha256(path)
    return PartFile(part.name, file, size, sha256, part.action, part.layer, entries, kind, content)


def _complete(
    source: TensorSource,
    plan: LoadPlan,
    adapters: Mapping[int, Path],
    folder: Path,
    files: Iterator[PartFile],
    identity: str,
) -> Manifest:
    """Everything beside the shards: side files, adapters, the manifest, and the index of each tensor's last file."""
    source.write_side_files(folder)
    side = {file.name: _entry(file) for file in _files_of(folder) if file.name not in (LOG, MANIFEST)}
    stages = []
    for number, stage in enumerate(plan.stages, start=1):
        adapter = _copy_adapter(adapters[number], folder, stage.name) if number in adapters else None
        stages.append(StageFiles(stage.name, tuple(islice(files, len(stage.parts))), adapter))
    manifest = Manifest(
        source=source.provenance.source,
        source_sha256=source.provenance.sha256,
        kind=source.provenance.kind,
        plan_sha256=identity,
        side=side,
        stages=tuple(stages),
    )
    if not manifest.formats:  # else no file has a tensor that stock transformers could read
        index = {
            "metadata": {"total_size": _payload(Part("all", tuple(source.names)), source)},
            "weight_map": {name: part.file for stage in stages for part in stage.parts for name in part.tensors},
        }
        write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    check_layout(manifest)
    check_complete(folder, manifest, source.shapes)
    write_manifest(folder, manifest)
    return manifest


def _copy_adapter(adapter: Path, folder: Path, stage: str) -> AdapterFiles:
    target = adapter_folder(stage)
    (folder / target).mkdir(parents=True, exist_ok=True)
    files = {}
    for file in _files_of(adapter):
        shutil.copyfile(file, folder / target / file.name)
        files[file.name] = _entry(file)
    return AdapterFiles(target, files)


def _entry(file: Path) -> FileEntry:
    return FileEntry(file.stat().st_size, file_sha256(file))


def _files_of(adapter: Path) -> list[Path]:
    return sorted(path for path in adapter.iterdir() if path.is_file())


def _payload(part: Part, source: TensorSource) -> int:
    """Bytes of the tensors of a part, as it stores them, or at most where it codes them."""
    if part.coding:
        return part.coding.most_bytes(source, part)
    rounded = DTYPES[part.dtype][1] if part.dtype else None
    return sum((rounded or source.dtype(name).itemsize) * math.prod(source.shapes[name]) for name in part.tensors)


def _write_error(error: Exception, folder: Path, missing: int) -> StageError:
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return StageError(
            f"the disk of {folder} is full: {missing:,} bytes are still needed; free some and stage again, what is "
            "finished is kept"
        )
    return StageError(f"cannot stage to {folder}: {first_line(error)}; mend that and stage again")
