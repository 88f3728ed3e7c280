"""What is wrong with a file, as the one line that a user can act on (standard library only)."""

import gzip
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    from lzma import LZMAError
except ImportError:  # a Python that was built without it refuses such a stream itself
    LZMAError = zlib.error

MOST_BYTES = 1 << 28  # of a text that is read as a whole, unless its reader says otherwise

FAULTS = (
    *(ValueError, LookupError, ArithmeticError, EOFError, MemoryError, zlib.error, LZMAError, zipfile.BadZipFile),
    *(RuntimeError, NotImplementedError),  # RecursionError; and what zipfile says of ciphers and of unknown methods
)
"""What the readers of Python's own library raise for a damaged file, beside OSError."""


class ParseError(ValueError):
    """The place in a file and what is wrong there; who knows the file and the mend adds them (``errors_as``)."""


@contextmanager
def errors_as(path: object, kind: Callable[[str], Exception], mend: str) -> Iterator[None]:
    """Raise any fault that a reader finds inside the block as ``kind``: "PATH: FAULT; MEND", on one line."""
    try:
        yield
    except OSError as error:
        raise kind(f"{_short(path, 300)} cannot be read: {error.strerror or error}; {mend}") from error
    except UnicodeError as error:
        raise kind(f"{_short(path, 300)}: it is no UTF-8 text; {mend}") from error
    except FAULTS as error:
        fault = str(error) if isinstance(error, ParseError) else f"{type(error).__name__}, {error}"
        raise kind(f"{_short(path, 300)}: {_short(fault, 400)}; {mend}") from error


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """All of a regular file. Raises OSError, and ParseError for a file that is none or longer than ``most`` bytes."""
    if (size := regular_size(path)) > most:
        raise ParseError(f"it has {size:,} bytes, and at most {most:,} are read")
    return path.read_bytes()


def read_gzip(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a gzip file, of which a few bytes may stand for more than a machine has.

    Raises OSError, EOFError and zlib.error for one that is torn, and ParseError for one of more than ``most`` bytes.
    """
    regular_size(path)
    with gzip.open(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ParseError(f"it unpacks to more than {most:,} bytes")
    return content


def regular_size(path: Path) -> int:
    """Bytes of a file. Raises OSError, and ParseError for a pipe or a device, which to open may never end."""
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # to open a folder says what it is
        raise ParseError("it is no regular file")
    return status.st_size


def shown(value: object, most: int = 40) -> str:
    """A value as a message shows it: a line of at most ``most`` characters that any terminal takes."""
    return _short(ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value), most)


def _short(text: object, most: int) -> str:
    line = " ".join(str(text).split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= most else line[: most - 3] + "..."
