"""The files of a staged checkpoint that a load reads, and their order (standard library only)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Manifest, PartFile
from firsttoken.progressiveserve.loading.reader import Allocate, Blob, BlobReader, host_memory

if TYPE_CHECKING:
    from firsttoken.progressiveserve.loading.http_reader import RemotePath


Folder: TypeAlias = "Path | RemotePath"
"""Where a staged checkpoint's files are read: here, or from a data server."""

ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)


def parts_of(manifest: Manifest, stages: Sequence[int]) -> list[PartFile]:
    """The parts that ``stages`` (1-based) need, in the order of the forward pass.

    Of tensors that a later one of the same stages overwrites only that is read; what refines is read with all before.
    """
    bringing = [part for stage in sorted(stages) for part in manifest.stages[stage - 1].parts]
    made_of: dict[str, list[PartFile]] = {}
    for part in bringing:
        for name in part.carried:
            made_of[name] = [*(made_of.get(name, []) if part.refines else []), part]
    needed = [part for part in bringing if any(part in made_of[name] for name in part.carried)]
    return sorted(needed, key=_depth)


def _depth(part: PartFile) -> float:
    if part.layer is not None:
        return part.layer
    return -1.0 if any(".embed_tokens." in name for name in part.carried) else float("inf")


def part_blobs(folder: Folder, manifest: Manifest, stages: Sequence[int]) -> list[Blob]:
    """Return the files of :func:`parts_of` as blobs to read."""
    return [Blob(folder / part.file, part.name, part.bytes, part.sha256) for part in parts_of(manifest, stages)]


def adapter_blobs(folder: Folder, manifest: Manifest, stages: Sequence[int]) -> list[Blob]:
    """The two files of the adapter of the last of ``stages``; none where it has no adapter."""
    adapter = manifest.stages[max(stages) - 1].adapter
    if adapter is None:
        return []
    label = f"the adapter of stage {max(stages)}"
    return [
        Blob(folder / adapter.folder / name, label, adapter.files[name].bytes, adapter.files[name].sha256)
        for name in ADAPTER_FILES
    ]


def open_reader(
    folder: Folder,
    manifest: Manifest,
    stages: Sequence[int],
    links: Sequence[Link],
    *,
    threads: int = 8,
    verify: bool = True,
    allocate: Allocate = host_memory,
) -> BlobReader:
    """A started reader of ``stages`` (1-based): the last one's adapter first, then the parts in forward order."""
    blobs = adapter_blobs(folder, manifest, stages) + part_blobs(folder, manifest, stages)
    reader = BlobReader(blobs, links, threads=threads, verify=verify, allocate=allocate)
    reader.start()
    return reader
