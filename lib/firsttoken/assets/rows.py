"""The rows of a pinned Arrow file, kept as plain JSON once read: a measuring machine need not have pyarrow."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from firsttoken.assets.lock import asset_path, pinned
from firsttoken.study import paths
from firsttoken.study.errors import CorpusError
from firsttoken.study.files import replacing
from firsttoken.study.foreign.faults import blaming
from firsttoken.study.foreign.json_text import json_lines
from firsttoken.study.foreign.packed import read_gzip


def arrow_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a pinned Arrow IPC stream such as "sciq-validation.arrow".

    They come from a copy in CACHE/rows where there is a sound one, else from the Arrow file, and are then kept there:
    copy CACHE/rows to a machine that has no pyarrow. Raises AssetError when neither is present or the asset is damaged,
    and CorpusError when the content cannot be read.
    """
    return kept_rows(f"{Path(name).stem}-{pinned(name).sha256[:12]}", lambda: _read_arrow(asset_path(name)))


def kept_rows(name: str, make: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """What CACHE/rows keeps as ``name``, where that is sound, else what ``make`` gives, which is then kept.

    A pair comes back as a list. Raises CorpusError where a folder is in its place, and what ``make`` raises.
    """
    kept = paths.CACHE / "rows" / f"{name}.jsonl.gz"
    if not (rows := _kept(kept)):
        if kept.is_dir():
            raise CorpusError(f"{kept} is a folder, where a copy of the rows is kept; remove it")
        rows = make()
        with replacing(kept) as partial, gzip.open(partial, "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def _kept(path: Path) -> list[Any]:
    """The rows in a copy; none where there is none, or gzip's own sum does not fit: it is then made again."""
    try:
        with blaming(path, CorpusError, "it is made again"):
            return [row for _, row in json_lines(read_gzip(path))]
    except CorpusError:
        return []


def _read_arrow(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise CorpusError(f"{path.name} needs pyarrow: install it, or copy .cache/rows from where it is") from error
    with blaming(path.name, CorpusError, "run `firsttoken fetch`"), pa.memory_map(str(path)) as source:
        table = pa.ipc.open_stream(source).read_all()  # pa.ArrowInvalid is a ValueError
        table.validate(full=True)  # offsets that lead outside would end the process
        return table.to_pylist()
