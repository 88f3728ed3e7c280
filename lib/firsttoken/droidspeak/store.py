"""A store of KV- and E-caches, layer by layer, under DroidSpeak's names: store, fetch, partial_prefill (4.4).

Entries lie on two tiers and are found by prefix, for many readers and one writer at a time. With a folder every entry
lies on disk and the memory is a cache before it; without one the memory is all there is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from firsttoken.droidspeak import prefill
from firsttoken.droidspeak.entry import Entry, e_cache_name, layer_name
from firsttoken.droidspeak.forward import Forward
from firsttoken.droidspeak.identity import ModelIdentity, check_compatible, explain_mismatch
from firsttoken.droidspeak.kvfile import KVFile, read_piece
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefix import LayerKV, Prefix, PrefixCache
from firsttoken.droidspeak.prefix_index import Hit, PrefixIndex, token_bytes
from firsttoken.droidspeak.tiers import DiskTier, MemoryTier
from firsttoken.study.errors import CacheError, RequestError

_RECOMPUTED = LayerKV(torch.empty(0), torch.empty(0))  # stands where the receiver computes its own


@dataclass(frozen=True)
class Reading:
    """An entry while it is read, of which the first ``tokens`` tokens are wanted.

    Memory's pieces and the open file are held from the beginning, so the entry stays whole when it is evicted.
    """

    store: KVStore
    entry: Entry
    tokens: int
    pieces: Mapping[str, Tensor]
    file: KVFile | None
    handle: int | None

    def kv(self, layer: int) -> LayerKV:
        """Keys and values of ``layer``, [1, kv_heads, tokens, head_dim] each. Raises as :meth:`piece`."""
        return LayerKV(*self.piece(layer_name(layer))[..., : self.tokens, :])

    def e_cache(self, layer: int) -> Tensor:
        """The E-cache at ``layer``, [1, tokens, hidden]. Raises as :meth:`piece`."""
        return self.piece(e_cache_name(layer))[:, : self.tokens]

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


class KVStore:
    """Stores ``memory_bytes`` of tensors, ``disk_bytes`` of files in ``folder`` at most; least recently used go first.

    With a folder, what it holds already is found, every entry lies there, and the memory is a cache; without one the
    memory is all. Prefixes are matched by blocks of ``block_tokens`` tokens, a last block that is not full only where
    the context ends there too. Safe for threads; what another process does to the folder shows after ``refresh``.
    Raises RequestError for a negative size and CacheError for a folder that cannot be had.
    """

    def __init__(self, folder: Path | None, *, memory_bytes: int, disk_bytes: int = 0, block_tokens: int = 16) -> None:
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
            self._add(file.entry)

    def __len__(self) -> int:
        """Return the number of stored prefixes."""
        return len(self._entries)

    @property
    def used(self) -> tuple[int, int]:
        """Bytes of tensors in memory and of files on disk."""
        with self._lock:
            return self._memory.lru.used, self._disk.lru.used if self._disk else 0

    @property
    def files(self) -> list[KVFile]:
        """The files on disk, and what is in them; none without a folder."""
        with self._lock:
            return self._disk.files if self._disk else []

    @property
    def models(self) -> list[ModelIdentity]:
        """The identities of the models that computed what is kept, each once."""
        with self._lock:
            return list(dict.fromkeys(entry.model for entry in self._entries.values()))

    def refresh(self) -> bool:
        """Find what another process has put into the folder or taken out of it; return whether one has."""
        with self._lock:
            new, gone = self._disk.scan() if self._disk else ([], [])
            for key in gone:
                self._forget(key)
            for entry in new:
                self._add(entry)
        return bool(new or gone)

    def drop(self, key: str) -> None:
        """Remove the prefix of this key; an open reader still has all of it. Raises CacheError where it is absent."""
        with self._lock:
            if key not in self._entries:
                raise CacheError(f"no prefix {key[:80]!r} is stored; `firsttoken prefix list` names them")
            self._remove(key)

    def store(self, context: Sequence[int], model: ModelIdentity, cache: PrefixCache) -> None:
        """Keep what ``model`` computed for the token ids ``context``: KV [1, kv_heads, tokens, head_dim] and its edges.

        An earlier storing of the same is replaced; what was used least recently makes room. Raises CacheError when the
        cache is not of this model and as many tokens, when it is larger than the store, which then stays as it was, or
        when the disk does not take it.
        """
        entry = Entry(model, _tokens(context), tuple(sorted(cache.e_cache)))
        pieces = entry.pieces(cache)
        if self._disk is None:
            self._memory.check(entry.length, pieces)
            with self._lock:
                self._remove(entry.key)
                for key in self._memory.add(entry.key, pieces):
                    self._remove(key)
                self._add(entry)
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
                self._add(entry)

    def match(self, context: Sequence[int], model: ModelIdentity, e_cache_layer: int | None = None) -> int:
        """Return how many of the first tokens of ``context`` are stored for ``model`` (with the E-cache at layer
        ``e_cache_layer``)."""
        tokens = _tokens(context)
        with self._lock:
            hit = self._find(tokens, model, e_cache_layer)
        return hit.tokens if hit else 0

    @contextmanager
    def open(self, context: Sequence[int], model: ModelIdentity, e_cache_layer: int | None = None) -> Iterator[Reading]:
        """The entry with the longest stored prefix of ``context`` (with the E-cache at layer ``e_cache_layer``).

        Raises CacheError, with the reason, when there is none.
        """
        tokens = _tokens(context)
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

    def fetch(self, context: Sequence[int], model: ModelIdentity, layer: int) -> LayerKV:
        """KV of one layer [1, kv_heads, match, head_dim], on the CPU; of a file no other layer is read.

        The tensors are the store's own: do not write to them. Raises CacheError, with the reason, when nothing of the
        context is stored for ``model`` or when the file is torn, and RequestError for a layer that it does not have.
        """
        _check_layer(layer, model)
        with self.open(context, model) as reading:
            return reading.kv(layer)

    def fetch_e_cache(self, context: Sequence[int], model: ModelIdentity, layer: int) -> Tensor:
        """The E-cache at ``layer`` [1, ``match(context, model, layer)``, hidden]; all else as ``fetch``."""
        _check_layer(layer, model)
        with self.open(context, model, layer) as reading:
            return reading.e_cache(layer)

    def locate(
        self, context: Sequence[int], model: ModelIdentity, e_cache_layer: int | None = None
    ) -> tuple[KVFile, int]:
        """Return the file in which a link finds the longest stored prefix (with the E-cache at layer
        ``e_cache_layer``), and how many of the first tokens of its pieces are wanted.

        The file is the most recently used now, and stays until it no longer is: open it soon. Raises CacheError when
        there is none, or when the store has no folder.
        """
        tokens = _tokens(context)
        with self._lock:
            if self._disk is None:
                raise CacheError("this store keeps everything in memory, where a link reads nothing; give it a folder")
            hit = self._hit(tokens, model, e_cache_layer)
            return self._disk.file(hit.key), hit.tokens

    def partial_prefill(
        self,
        recompute: Group,
        context: Sequence[int],
        *,
        receiver_model: PreTrainedModel,
        receiver: ModelIdentity,
        sender: ModelIdentity,
    ) -> DynamicCache:
        """The receiver's cache for all of ``context``: its own in the layers ``recompute``, the sender's in the others.

        Only those others and the E-cache at the lower edge are read. Tokens behind the longest stored prefix are
        computed by the receiver in every layer. Raises CacheError when receiver and sender do not fit or as ``fetch``
        does, and RequestError when the group does not fit the model.
        """
        check_compatible(sender, receiver)
        recompute.check(sender.layers)
        e_cache_layer, device = recompute.lo if recompute.needs_e_cache else None, receiver_model.device
        with self.open(context, sender, e_cache_layer) as reading:
            kv = tuple(
                _RECOMPUTED if layer in recompute else LayerKV(*(part.to(device) for part in reading.kv(layer)))
                for layer in range(sender.layers)
            )
            edges = {} if e_cache_layer is None else {e_cache_layer: reading.e_cache(e_cache_layer).to(device)}
            stored = reading.tokens
        cache = prefill.partial_prefill(
            receiver_model, Prefix.of([context[:stored]], device), PrefixCache(kv, edges), recompute
        )
        if stored < len(context):
            with torch.inference_mode():
                forward = Forward(receiver_model, Prefix.of([context], device), new=len(context) - stored)
                forward.run(forward.embed(), range(forward.depth), cache)
        return cache

    def keep(self, entry: Entry, name: str, piece: Tensor) -> None:
        """Hold in memory what was read of ``entry``, unless it has gone meanwhile."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                self._memory.add(entry.key, {name: piece})

    def discard(self, entry: Entry) -> bool:
        """Remove an entry that turned out to be torn, unless it has been replaced meanwhile; whether it was there."""
        with self._lock:
            held = self._entries.get(entry.key) is entry
            if held:
                with suppress(CacheError):  # a folder that lets go of no file: it is not read again
                    self._remove(entry.key)
        return held

    def _add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._index.add(entry.key, entry.model.key, entry.tokens)

    def _forget(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._index.remove(key, entry.model.key, entry.tokens)
            self._memory.drop(key)
        return entry is not None

    def _remove(self, key: str) -> None:
        if self._forget(key) and self._disk:
            self._disk.drop(key)

    def _find(self, tokens: bytes, model: ModelIdentity, e_cache_layer: int | None = None) -> Hit | None:
        if e_cache_layer is None:
            return self._index.longest(model.key, tokens)
        return self._index.longest(model.key, tokens, lambda key: e_cache_layer in self._entries[key].edges)

    def _hit(self, tokens: bytes, model: ModelIdentity, e_cache_layer: int | None) -> Hit:
        if hit := self._find(tokens, model, e_cache_layer):
            return hit
        if hit := self._find(tokens, model):
            edges = ", ".join(map(str, self._entries[hit.key].edges)) or "none"
            raise CacheError(
                f"no E-cache at layer {e_cache_layer} is stored for this context (there: {edges}); store that edge too"
            )
        for other in dict.fromkeys(entry.model for entry in self._entries.values()):
            if model.may_read(other) and self._find(tokens, other):  # nobody learns of what is another's
                raise CacheError(f"this context is stored by {other}, not by {model}: {explain_mismatch(other, model)}")
        raise CacheError(
            f"no stored context of {model} shares its first {self._index.block_tokens} tokens with this one; compute "
            "and store it"
        )


def _tokens(context: Sequence[int]) -> bytes:
    if not len(context):
        raise RequestError("an empty context has no KV cache; give at least one token")
    return token_bytes(context)


def _check_layer(layer: int, model: ModelIdentity) -> None:
    if not 0 <= layer < model.layers:
        raise RequestError(f"{model} has layers 0 to {model.layers - 1}, no layer {layer}")
