"""The lower tier: a folder of KV files. It outlives the process, and keeps the order of use in the files' times.

Not safe for threads: the store that owns it holds its lock, except while a draft is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from firsttoken.droidspeak.entry import Entry
from firsttoken.droidspeak.kvfile import Draft, KVFile, draft, file_name, read_header
from firsttoken.droidspeak.recency import Recency
from firsttoken.study.errors import CacheError


class DiskTier:
    """The KV files in ``folder``, at most ``limit`` bytes; other files there, temporary ones too, are left alone.

    Torn files are removed when the folder is opened, and the least recently used of those that do not fit. Raises
    CacheError for a folder that cannot be had.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._recency = Recency(limit)
        self._files: dict[str, KVFile] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob(file_name("*")), key=lambda path: path.lstat().st_mtime_ns):
                if re.fullmatch(file_name("[0-9a-f]{32}"), path.name):
                    self._adopt(path)
        except OSError as error:
            raise self._unusable(error) from error

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return self._recency.used

    @property
    def entries(self) -> list[Entry]:
        """What is in the files."""
        return [file.entry for file in self._files.values()]

    def draft(self, entry: Entry, pieces: Mapping[str, Tensor]) -> Draft:
        """The file to write for ``entry``. Raises CacheError when it is larger than the tier."""
        made = draft(self.folder / file_name(entry.key), entry, pieces)
        if made.file.nbytes > self.limit:
            raise CacheError(
                f"the KV cache of {entry.length} tokens takes {made.file.nbytes:,} bytes on disk, all of the store has "
                f"{self.limit:,}; raise disk_bytes"
            )
        return made

    def reserve(self, made: Draft) -> list[str]:
        """Set room aside for a draft; returns the entries that must be dropped for it, before it is written."""
        return self._recency.put(made.file.entry.key, made.file.nbytes)

    def write(self, made: Draft) -> None:
        """Write a draft into its room. Raises CacheError when the disk is full or does not take it."""
        try:
            made.write()
        except OSError as error:
            raise self._unusable(error) from error

    def publish(self, made: Draft) -> None:
        """What was written can be opened from now on."""
        self._files[made.file.entry.key] = made.file
        self.file(made.file.entry.key)  # writing stamps a coarser time than a use does: the order would turn round

    def file(self, key: str) -> KVFile:
        """Where ``key`` lies, which counts as a use."""
        file = self._files[key]
        self._recency.touch(key)
        now = time.time_ns()
        with contextlib.suppress(OSError):  # a file that is gone is found out by opening it
            os.utime(file.path, ns=(now, now))
        return file

    def drop(self, key: str) -> None:
        """Remove ``key`` with its file, or its room; who has the file open can read on.

        Raises CacheError when the folder does not let go of the file.
        """
        self._recency.drop(key)
        if file := self._files.pop(key, None):
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                raise self._unusable(error) from error

    def _adopt(self, path: Path) -> None:
        try:
            file = read_header(path)
        except CacheError:
            with contextlib.suppress(OSError):  # a folder of that name, or a file that is not this user's: left alone
                path.unlink()
            return
        if file.nbytes > self.limit:
            path.unlink()
            return
        gone = self._recency.put(file.entry.key, file.nbytes)
        self._files[file.entry.key] = file
        for key in gone:
            self.drop(key)

    def _unusable(self, error: OSError) -> CacheError:
        return CacheError(
            f"no KV cache can be kept in {self.folder}: {error.strerror}; mend that or use another folder"
        )
