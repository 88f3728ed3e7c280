"""The rows of a pinned Arrow file, kept as plain JSON once read: a measuring machine need not have pyarrow."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from firsttoken.assets.lock import asset_path, pinned
from firsttoken.study import paths
from firsttoken.study.errors import CorpusError
from firsttoken.study.files import replacing


def arrow_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a pinned Arrow IPC stream such as "sciq-validation.arrow".

    They come from a copy in CACHE/rows where there is one, else from the Arrow file, and are then kept there: copy
    CACHE/rows to a machine that has no pyarrow. Raises AssetError when neither is present or the asset is damaged, and
    CorpusError when the content cannot be read.
    """
    kept = paths.CACHE / "rows" / f"{Path(name).stem}-{pinned(name).sha256[:12]}.jsonl.gz"
    if kept.is_file():
        try:
            with gzip.open(kept, "rt", encoding="utf-8") as lines:
                return [json.loads(line) for line in lines]
        except (OSError, EOFError, ValueError) as error:
            raise CorpusError(f"{kept} is truncated or altered; delete it, it is made again") from error
    rows = _read_arrow(asset_path(name))
    with replacing(kept) as partial, gzip.open(partial, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def _read_arrow(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise CorpusError(f"{path.name} needs pyarrow: install it, or copy .cache/rows from where it is") from error
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).read_all().to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise CorpusError(f"{path.name} is truncated or no Arrow stream; run `firsttoken fetch`") from error
