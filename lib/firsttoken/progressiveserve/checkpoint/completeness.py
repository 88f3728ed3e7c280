"""Is a staged checkpoint the model that its config.json describes, whole? Asked when it was written, and before a stage
serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from firsttoken.progressiveserve.checkpoint.manifest import CONFIG, MANIFEST, MEND, Manifest, PartFile
from firsttoken.study.errors import ModelError, StageError
from firsttoken.study.parsing.parse_errors import Damaged, blaming
from firsttoken.study.parsing.safetensors_header import METADATA, header_table


def check_complete(folder: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Hold what ``manifest`` brings against ``shapes``: the model's parameters by name, without a tied head.

    That its files are filled by their tensors to the last byte, ``layout`` has checked. So every byte of the model is
    brought once: no part can be lost, doubled or shortened without an error here.
    Raises ModelError for a parameter that no stage brings, one that the model does not have, or brings twice, or has in
    another shape; for a layer in pieces; and for what stays rounded in the end.
    What several parts bring of a tensor must be of one: of the same dtype, and of the same bytes in the end.
    """
    try:
        manifest.plan.check(list(shapes))
    except StageError as error:
        raise ModelError(f"{folder} does not stage the model of its {CONFIG}: {error}; {MEND}") from error
    whose: dict[str, tuple[str, str]] = {}
    for part in (part for stage in manifest.stages for part in stage.parts):
        for name, entry in part.carried.items():
            if entry.shape != shapes[name]:
                raise ModelError(
                    f"{folder}: {part.name} brings {name} as {list(entry.shape)}, by {CONFIG} it has the shape "
                    f"{list(shapes[name])}; {MEND}"
                )
        for name, tensor in part.coded.items():
            found = tensor.dtype, tensor.sha256
            if whose.setdefault(name, found) != found:
                raise ModelError(f"{folder}: {part.file} holds {name} of another checkpoint; {MEND}")


def check_header(part: PartFile, header: bytes) -> None:
    """Raise ModelError unless a file that begins with ``header`` says of its tensors what the manifest says."""
    with blaming(part.file, ModelError, MEND):
        length = int.from_bytes(header[:8], "little") + 8
        table = json.loads(header[8:])  # without limits, and in a tenth of the time: it must equal what is known
        said = {name: entry for name, entry in table.items() if name != METADATA} if isinstance(table, dict) else table
        if length != part.data_start or said != header_table(part.tensors, length):
            raise Damaged(f"its header and {MANIFEST} say different things of its tensors")
