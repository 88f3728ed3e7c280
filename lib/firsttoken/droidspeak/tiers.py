"""The tiers of a store: memory, and a folder of KV files, which outlives the process and has the order of use in the
files' times.

Neither is safe for threads: the store that owns them holds its lock, except while a draft is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from firsttoken.droidspeak.entry import Entry
from firsttoken.droidspeak.kvfile import Draft, KVFile, draft, file_name, read_header
from firsttoken.study.errors import CacheError

_NAME = re.compile(re.escape(file_name("K")).replace("K", "[0-9a-f]{32}"))
_TICK_NS = 50_000_000


class LruQueue:
    """Keys with their bytes in the order of their last use; together they never hold more than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._bytes: OrderedDict[str, int] = OrderedDict()

    def put(self, key: str, size: int) -> list[str]:
        """Give ``key`` room for ``size`` bytes, at most ``limit``; returns the keys that had to make room."""
        assert size <= self.limit, "what can never fit is refused before"
        self.drop(key)
        gone = []
        while self.used + size > self.limit:
            oldest, freed = self._bytes.popitem(last=False)
            self.used -= freed
            gone.append(oldest)
        self._bytes[key] = size
        self.used += size
        return gone

    def touch(self, key: str) -> None:
        """``key``, where it is held, was used just now."""
        if key in self._bytes:
            self._bytes.move_to_end(key)

    def drop(self, key: str) -> None:
        """Take ``key`` out, where it is held."""
        self.used -= self._bytes.pop(key, 0)


class MemoryTier:
    """Keeps at most ``limit`` bytes of tensors in memory, by entry and name of the piece.

    An entry may be there in part, layer by layer; it goes as a whole.
    """

    def __init__(self, limit: int) -> None:
        self.lru = LruQueue(limit)
        self._pieces: dict[str, dict[str, Tensor]] = {}

    def check(self, length: int, pieces: Mapping[str, Tensor]) -> None:
        """Raise CacheError when the ``pieces`` of a prefix of ``length`` tokens are larger than the tier."""
        size = sum(piece.nbytes for piece in pieces.values())
        if size > self.lru.limit:
            raise CacheError(
                f"the KV cache of {length} tokens takes {size:,} bytes, all of the store has {self.lru.limit:,}; "
                "raise memory_bytes"
            )

    def add(self, key: str, pieces: Mapping[str, Tensor]) -> list[str]:
        """Keep ``pieces`` with those of ``key`` that are there, unless all of them together are larger than the tier.

        Returns the entries that made room for them.
        """
        held = self._pieces.get(key, {}) | dict(pieces)
        size = sum(piece.nbytes for piece in held.values())
        if size > self.lru.limit:
            return []
        gone = self.lru.put(key, size)
        for other in gone:
            del self._pieces[other]
        self._pieces[key] = held
        return gone

    def pieces(self, key: str) -> Mapping[str, Tensor]:
        """Return the held pieces of ``key``, which counts as a use; they stay as they are when the entry goes."""
        self.lru.touch(key)
        return self._pieces.get(key, {})

    def drop(self, key: str) -> None:
        """Remove ``key`` and its pieces."""
        self.lru.drop(key)
        self._pieces.pop(key, None)


class DiskTier:
    """The KV files in ``folder``, at most ``limit`` bytes; other files there, temporary ones too, are left alone.

    Torn files are removed when the folder is opened, and the least recently used of those that do not fit. Raises
    CacheError for a folder that cannot be had.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.lru = LruQueue(limit)
        self._files: dict[str, KVFile] = {}
        self._changed: dict[str, int] = {}  # when each file was last stamped
        self._faults: set[str] = set()  # of torn files, which are named once
        self._stamp = 0  # of the folder, when it was last looked through
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob(file_name("*")), key=lambda path: path.lstat().st_mtime_ns):
                if _NAME.fullmatch(path.name):
                    self._load(path)
        except OSError as error:
            raise self._unusable(error) from error

    @property
    def files(self) -> list[KVFile]:
        """The files, and what is in them."""
        return list(self._files.values())

    def scan(self) -> tuple[list[Entry], list[str]]:
        """Return the entries that others have put into the folder since this was last called, and the keys of those
        that they took out of it or replaced, of which no file is removed. Where the folder was not changed, only the
        system is asked."""
        try:
            stamp = self.folder.stat().st_mtime_ns
            if stamp == self._stamp:
                return [], []
            with os.scandir(self.folder) as scanned:
                present = {
                    scanned_file.name: scanned_file.stat().st_ctime_ns
                    for scanned_file in scanned
                    if _NAME.fullmatch(scanned_file.name)
                }
        except OSError:  # the folder itself is gone, and its files with it
            stamp, present = 0, {}
        names = {file_name(key): key for key in self._files}
        new, gone = [], [key for name, key in names.items() if name not in present]
        for name, changed in sorted(present.items()):
            key = names.get(name)
            if key is not None and self._changed.get(key) == changed:
                continue
            file = self._read(self.folder / name)
            if key is not None and file == self._files[key]:  # somebody has read it, which stamps it
                self._changed[key] = changed
                continue
            gone += [] if key is None else [key]
            new += [] if file is None else [file]
        for key in gone:
            self._forget(key)
        entries = []
        for file in new:
            if self.lru.used + file.nbytes <= self.limit:  # nothing has to go for what others bring
                self._add(file)
                entries.append(file.entry)
        # what comes within the same tick of the file system's clock does not change its stamp
        self._stamp = stamp if time.time_ns() - stamp > _TICK_NS else 0
        return entries, gone

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
        return self.lru.put(made.file.entry.key, made.file.nbytes)

    def write(self, made: Draft) -> None:
        """Write a draft into its room. Raises CacheError when the disk is full or does not take it."""
        try:
            made.write()
        except OSError as error:
            raise self._unusable(error) from error

    def publish(self, made: Draft) -> None:
        """Let the written draft be opened from now on."""
        self._add(made.file)
        self.file(made.file.entry.key)  # writing stamps a coarser time than a use does: the order would turn round

    def file(self, key: str) -> KVFile:
        """Return the file in which ``key`` lies; this counts as a use of it."""
        file = self._files[key]
        self.lru.touch(key)
        now = time.time_ns()
        with contextlib.suppress(OSError):  # a file that is gone is found out by opening it
            os.utime(file.path, ns=(now, now))
        return file

    def drop(self, key: str) -> None:
        """Remove ``key`` with its file, or its room; who has the file open can read on.

        Raises CacheError when the folder does not let go of the file.
        """
        if file := self._forget(key):
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                raise self._unusable(error) from error

    def _load(self, path: Path) -> None:
        file = self._read(path)
        if file is None:
            with contextlib.suppress(OSError):  # a folder of that name, or a file that is not this user's: left alone
                path.unlink()
            return
        if file.nbytes > self.limit:
            path.unlink()
            return
        for key in self.lru.put(file.entry.key, file.nbytes):
            self.drop(key)
        self._add(file)

    def _read(self, path: Path) -> KVFile | None:
        """Read the header of the file at ``path``; None for a torn one, which a line on the terminal names the first
        time."""
        try:
            return read_header(path)
        except CacheError as error:
            if path.exists() and str(error) not in self._faults:
                print(f"firsttoken: {error}", file=sys.stderr, flush=True)
                self._faults.add(str(error))
            return None

    def _add(self, file: KVFile) -> None:
        key = file.entry.key
        self.lru.put(key, file.nbytes)
        self._files[key] = file
        with contextlib.suppress(OSError):  # a file that is gone is found out by opening it
            self._changed[key] = file.path.stat().st_ctime_ns

    def _forget(self, key: str) -> KVFile | None:
        self.lru.drop(key)
        self._changed.pop(key, None)
        return self._files.pop(key, None)

    def _unusable(self, error: OSError) -> CacheError:
        return CacheError(
            f"no KV cache can be kept in {self.folder}: {error.strerror}; mend that or use another folder"
        )
