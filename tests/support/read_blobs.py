"""Files of random bytes, and what a reader makes of them."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path
from typing import Any

from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.loading.reader import Blob, BlobReader
from firsttoken.study.errors import FirstTokenError

CHUNK = 1000


def make_blob(path: Path, size: int) -> Blob:
    content = random.Random(size).randbytes(size)
    path.write_bytes(content)
    return Blob(path, f"layer {path.stem}", size, hashlib.sha256(content).hexdigest())


def outcome(reader: BlobReader, index: int) -> bytes | Exception:
    try:
        return bytes(reader.wait(index))
    except FirstTokenError as error:
        return error


def outcomes(reader: BlobReader) -> list[bytes | Exception]:
    """What every blob came to; a wait that never ends fails here instead of hanging the run."""
    found: list[bytes | Exception] = []
    waiter = threading.Thread(
        target=lambda: found.extend([outcome(reader, i) for i in range(len(reader.blobs))]), daemon=True
    )
    waiter.start()
    waiter.join(60)
    assert not waiter.is_alive(), f"blob {len(found)} is waited for without end"
    return found


def read(blobs: list[Blob], links: list[Link], **options: Any) -> list[bytes | Exception]:
    """What a reader with ``options`` makes of every blob, once it is closed."""
    reader = BlobReader(blobs, links, **options)
    reader.start()
    found = outcomes(reader)
    reader.close()
    return found


def content(blob: Blob) -> bytes:
    return blob.path.read_bytes()
