"""Writing a file or a folder whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` (same suffix) to write to; it takes the name of ``path`` when the block ends.

    On any exception the temporary file is removed, and a file that was there before stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # mkstemp keeps its files private; these are meant to be read and committed
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path, *, over_older: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``folder`` to fill; it takes the name of ``folder`` when the block ends.

    On any exception it is removed, and what was there before stays as it was. A folder that is there by then gives way
    where it is written ``over_older``, and is otherwise kept unless it is empty: OSError is raised.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True) as work:
        made, older = Path(work, "made"), Path(work, "older")
        made.mkdir()
        yield made
        for path in (made, *made.rglob("*")):  # else a shared cache would hide from others what some writers make
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            if over_older and folder.exists():
                folder.rename(older)
            made.rename(folder)
        except BaseException:
            if older.exists():
                older.rename(folder)
            raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
