"""Entries on two tiers, found by prefix, for many readers and one writer at a time.

With a folder every entry lies on disk and the memory is a cache before it; without one the memory is all there is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from firsttoken.droidspeak.disk_tier import DiskTier, LruQueue
from firsttoken.droidspeak.entry import Entry
from firsttoken.droidspeak.identity import ModelIdentity, difference
from firsttoken.droidspeak.kvfile import KVFile, read_piece
from firsttoken.droidspeak.prefix_index import Hit, PrefixIndex
from firsttoken.study.errors import CacheError, RequestError

# The upper tier: pieces of KV cache in memory. An entry goes as a whole; it may be there in part, layer by layer.
#
# Not safe for threads: the store that owns it holds its lock.


class MemoryTier:
    """Keeps at most ``limit`` bytes of tensors in memory, by entry and name of the piece."""

    def __init__(self, limit: int) -> None:
        self._lru = LruQueue(limit)
        self._pieces: dict[str, dict[str, Tensor]] = {}

    @property
    def used(self) -> int:
        """Bytes of all tensors."""
        return self._lru.used

    def check(self, length: int, pieces: Mapping[str, Tensor]) -> None:
        """Raise CacheError when the ``pieces`` of a prefix of ``length`` tokens are larger than the tier."""
        size = sum(piece.nbytes for piece in pieces.values())
        if size > self._lru.limit:
            raise CacheError(
                f"the KV cache of {length} tokens takes {size:,} bytes, all of the store has {self._lru.limit:,}; "
                "raise memory_bytes"
            )

    def add(self, key: str, pieces: Mapping[str, Tensor]) -> list[str]:
        """Keep ``pieces`` with those of ``key`` that are there, unless all of them together are larger than the tier.

        Returns the entries that made room for them.
        """
        held = self._pieces.get(key, {}) | dict(pieces)
        size = sum(piece.nbytes for piece in held.values())
        if size > self._lru.limit:
            return []
        gone = self._lru.put(key, size)
        for other in gone:
            del self._pieces[other]
        self._pieces[key] = held
        return gone

    def pieces(self, key: str) -> Mapping[str, Tensor]:
        """What is held of ``key``, which counts as a use; it stays as it is when the entry goes."""
        self._lru.touch(key)
        return self._pieces.get(key, {})

    def drop(self, key: str) -> None:
        """Forget ``key`` and its pieces."""
        self._lru.drop(key)
        self._pieces.pop(key, None)


@dataclass(frozen=True)
class Reading:
    """An entry while it is read, of which the first ``tokens`` tokens are wanted; ``piece`` is one of its tensors.

    Memory's pieces and the open file are held from the beginning, so the entry stays whole when it is evicted.
    """

    store: TieredStore
    entry: Entry
    tokens: int
    pieces: Mapping[str, Tensor]
    file: KVFile | None
    handle: int | None

    def piece(self, name: str) -> Tensor:
        """All of the piece ``name``. Raises CacheError when its file is torn; the entry is then removed."""
        if (held := self.pieces.get(name)) is not None:
            return held
        try:
            piece = read_piece(self.handle, self.file.spans[name])
        except CacheError as error:
            self.store.discard(self.entry)
            raise CacheError(
                f"{name} in {self.file.path} is torn ({error}); the file was removed: compute the prefix again"
            ) from error
        self.store.keep(self.entry, name, piece)
        return piece


class TieredStore:
    """Keeps ``memory_bytes`` of tensors and ``disk_bytes`` of files in ``folder`` at most; what is there already stays.

    Safe for threads. Raises RequestError for a negative size and CacheError for a folder that cannot be had.
    """

    def __init__(self, folder: Path | None, memory_bytes: int, disk_bytes: int, block_tokens: int) -> None:
        if min(memory_bytes, disk_bytes) < 0 or block_tokens < 1:
            raise RequestError(
                f"store: memory_bytes {memory_bytes}, disk_bytes {disk_bytes} and block_tokens {block_tokens} must be "
                "at least 0, 0 and 1"
            )
        self._lock = threading.Lock()  # of all that follows; never held while tensors are read, written or hashed
        self._writing = threading.Lock()  # so that the room set aside for a file stays its own
        self._memory = MemoryTier(memory_bytes)
        self._disk = DiskTier(folder, disk_bytes) if folder else None
        self._index = PrefixIndex(block_tokens)
        self._entries: dict[str, Entry] = {}
        for file in self.files:
            self._enter(file.entry)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def files(self) -> list[KVFile]:
        """The files on disk, none without a folder."""
        with self._lock:
            return self._disk.files if self._disk else []

    @property
    def models(self) -> list[ModelIdentity]:
        """The identities of the models that computed what is kept."""
        with self._lock:
            return list(dict.fromkeys(entry.model for entry in self._entries.values()))

    @property
    def used(self) -> tuple[int, int]:
        """Bytes in memory and on disk."""
        with self._lock:
            return self._memory.used, self._disk.used if self._disk else 0

    def put(self, entry: Entry, pieces: Mapping[str, Tensor]) -> None:
        """Keep an entry in place of an earlier one of its key; what was used least recently makes room.

        Raises CacheError when it is larger than the shelf, which then stays as it was, or when the disk is full.
        """
        if self._disk is None:
            self._memory.check(entry.length, pieces)
            with self._lock:
                self._remove(entry.key)
                for key in self._memory.add(entry.key, pieces):
                    self._remove(key)
                self._enter(entry)
            return
        draft = self._disk.draft(entry, pieces)
        # The earlier entry goes before its file is replaced: a reader that still found it would look for the old pieces
        # in the new bytes. While the file is written the lock is free, so that reading goes on.
        with self._writing:
            with self._lock:
                self._remove(entry.key)
                for key in self._disk.reserve(draft):
                    self._remove(key)
            try:
                self._disk.write(draft)
            except BaseException:
                with self._lock:
                    self._disk.drop(entry.key)
                raise
            with self._lock:
                self._disk.publish(draft)
                self._memory.add(entry.key, pieces)
                self._enter(entry)

    def longest(self, tokens: bytes, model: ModelIdentity, e_cache_layer: int | None = None) -> int:
        """How many of the first ``tokens`` are there for ``model``, with the E-cache at layer ``e_cache_layer``."""
        with self._lock:
            hit = self._find(tokens, model, e_cache_layer)
        return hit.tokens if hit else 0

    @contextlib.contextmanager
    def open(self, tokens: bytes, model: ModelIdentity, e_cache_layer: int | None = None) -> Iterator[Reading]:
        """The entry with the longest prefix of ``tokens``. Raises CacheError, with the reason, when there is none."""
        with self._lock:
            hit = self._hit(tokens, model, e_cache_layer)
            entry, pieces = self._entries[hit.key], self._memory.pieces(hit.key)
            file = self._disk.file(hit.key) if self._disk else None
            try:
                # The file is opened under the lock: an eviction may unlink it right after, and an open one can be read
                # on.
                handle = os.open(file.path, os.O_RDONLY) if file else None
            except OSError as error:
                self._remove(hit.key)
                raise CacheError(f"{file.path}: {error.strerror}; compute the prefix again") from error
        try:
            yield Reading(self, entry, hit.tokens, pieces, file, handle)
        finally:
            if handle is not None:
                os.close(handle)

    def locate(self, tokens: bytes, model: ModelIdentity, e_cache_layer: int | None = None) -> tuple[KVFile, int]:
        """The file that ``open`` would read, and the tokens wanted of it. Raises CacheError as ``open`` does."""
        with self._lock:
            if self._disk is None:
                raise CacheError("this store keeps everything in memory, where a link reads nothing; give it a folder")
            hit = self._hit(tokens, model, e_cache_layer)
            return self._disk.file(hit.key), hit.tokens

    def keep(self, entry: Entry, name: str, piece: Tensor) -> None:
        """Hold in memory what was read of ``entry``, unless it has gone meanwhile."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                self._memory.add(entry.key, {name: piece})

    def discard(self, entry: Entry) -> None:
        """Remove an entry that turned out to be torn, unless it has been replaced meanwhile."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                self._remove(entry.key)

    def refresh(self) -> bool:
        """Find what others have put into the folder or taken out of it meanwhile; return whether they have."""
        with self._lock:
            new, gone = self._disk.look() if self._disk else ([], [])
            for key in gone:
                self._leave(key)
            for entry in new:
                self._enter(entry)
        return bool(new or gone)

    def remove(self, key: str) -> None:
        """Take an entry out, and its file. Raises CacheError for a key that is not there."""
        with self._lock:
            if key not in self._entries:
                raise CacheError(f"no prefix {key[:80]!r} is stored; `firsttoken prefix list` names them")
            self._remove(key)

    def _enter(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._index.add(entry.key, entry.model.key, entry.tokens)

    def _leave(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._index.remove(key, entry.model.key, entry.tokens)
            self._memory.drop(key)
        return entry is not None

    def _remove(self, key: str) -> None:
        if self._leave(key) and self._disk:
            self._disk.drop(key)

    def _find(self, tokens: bytes, model: ModelIdentity, e_cache_layer: int | None = None) -> Hit | None:
        if e_cache_layer is None:
            return self._index.longest(model.key, tokens)
        return self._index.longest(model.key, tokens, lambda key: e_cache_layer in self._entries[key].edges)

    def _hit(self, tokens: bytes, model: ModelIdentity, e_cache_layer: int | None) -> Hit:
        if hit := self._find(tokens, model, e_cache_layer):
            return hit
        if hit := self._find(tokens, model):
            there = ", ".join(map(str, self._entries[hit.key].edges)) or "none"
            raise CacheError(
                f"no E-cache at layer {e_cache_layer} is stored for this context (there: {there}); store that edge too"
            )
        for other in dict.fromkeys(entry.model for entry in self._entries.values()):
            if model.may_read(other) and self._find(tokens, other):  # nobody learns of what is another's
                reason = difference(other, model) or "other weights, so ask for it under its own identity"
                raise CacheError(f"this context is stored by {other}, not by {model}: {reason}")
        raise CacheError(
            f"no stored context of {model} shares its first {self._index.block_tokens} tokens with this one; compute "
            "and store it"
        )
