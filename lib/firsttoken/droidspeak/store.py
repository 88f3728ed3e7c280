"""A store of KV- and E-caches, layer by layer, under DroidSpeak's names: store, fetch, partial_prefill (4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from firsttoken.droidspeak import prefill
from firsttoken.droidspeak.entry import Entry, e_cache_name, layer_name
from firsttoken.droidspeak.forward import Forward
from firsttoken.droidspeak.identity import ModelIdentity, check_compatible
from firsttoken.droidspeak.kvfile import KVFile, Located
from firsttoken.droidspeak.prefill import Group
from firsttoken.droidspeak.prefix import LayerKV, Prefix, PrefixCache
from firsttoken.droidspeak.prefix_index import token_bytes
from firsttoken.droidspeak.tiered_store import Reading, TieredStore
from firsttoken.study.errors import RequestError

_RECOMPUTED = LayerKV(torch.empty(0), torch.empty(0))  # stands where the receiver computes its own


class KVStore:
    """Stores ``memory_bytes`` of tensors, ``disk_bytes`` of files in ``folder`` at most; least recently used go first.

    With a folder, what it holds already is found, every entry lies there, and the memory is a cache; without one the
    memory is all. Prefixes are matched by blocks of ``block_tokens`` tokens, a last block that is not full only where
    the context ends there too. Safe for threads; what another process does to the folder shows after ``refresh``.
    Raises RequestError for a negative size and CacheError for a folder that cannot be had.
    """

    def __init__(self, folder: Path | None, *, memory_bytes: int, disk_bytes: int = 0, block_tokens: int = 16) -> None:
        self._tiers = TieredStore(folder, memory_bytes, disk_bytes, block_tokens)

    def __len__(self) -> int:
        """How many prefixes are kept."""
        return len(self._tiers)

    @property
    def used(self) -> tuple[int, int]:
        """Bytes of tensors in memory and of files on disk."""
        return self._tiers.used

    @property
    def files(self) -> list[KVFile]:
        """The files on disk, and what is in them."""
        return self._tiers.files

    @property
    def models(self) -> list[ModelIdentity]:
        """The identities of the models that computed what is kept, each once."""
        return self._tiers.models

    def refresh(self) -> bool:
        """Find what another process has put into the folder or taken out of it; return whether one has."""
        return self._tiers.refresh()

    def drop(self, key: str) -> None:
        """Remove the prefix of this key; who reads it has all of it. Raises CacheError where it is not there."""
        self._tiers.remove(key)

    def store(self, context: Sequence[int], model: ModelIdentity, cache: PrefixCache) -> None:
        """Keep what ``model`` computed for the token ids ``context``: KV [1, kv_heads, tokens, head_dim] and its edges.

        An earlier storing of the same is replaced. Raises CacheError when the cache is not of this model and as many
        tokens, when it is larger than the store, or when the disk does not take it.
        """
        entry = Entry(model, _tokens(context), tuple(sorted(cache.e_cache)))
        self._tiers.put(entry, entry.pieces(cache))

    def match(self, context: Sequence[int], model: ModelIdentity, e_cache_layer: int | None = None) -> int:
        """How many of the first tokens of ``context`` are stored for ``model`` (with the E-cache at layer
        ``e_cache_layer``)."""
        return self._tiers.longest(_tokens(context), model, e_cache_layer)

    def fetch(self, context: Sequence[int], model: ModelIdentity, layer: int) -> LayerKV:
        """KV of one layer [1, kv_heads, match, head_dim], on the CPU; of a file no other layer is read.

        The tensors are the store's own: do not write to them. Raises CacheError, with the reason, when nothing of the
        context is stored for ``model`` or when the file is torn, and RequestError for a layer that it does not have.
        """
        _check_layer(layer, model)
        with self._tiers.open(_tokens(context), model) as reading:
            return _kv(reading, layer)

    def fetch_e_cache(self, context: Sequence[int], model: ModelIdentity, layer: int) -> Tensor:
        """The E-cache at ``layer`` [1, ``match(context, model, layer)``, hidden]; all else as ``fetch``."""
        _check_layer(layer, model)
        with self._tiers.open(_tokens(context), model, layer) as reading:
            return _e_cache(reading, layer)

    def locate(self, context: Sequence[int], model: ModelIdentity, e_cache_layer: int | None = None) -> Located:
        """Return where a link finds the bytes of the longest stored prefix (with the E-cache at layer
        ``e_cache_layer``).

        The file is the most recently used now, and stays until it no longer is: open it soon. Raises CacheError when
        there is none, or when the store has no folder.
        """
        file, tokens = self._tiers.locate(_tokens(context), model, e_cache_layer)
        return Located(file.path, file.spans, tokens)

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
        with self._tiers.open(_tokens(context), sender, e_cache_layer) as reading:
            kv = tuple(
                _RECOMPUTED if layer in recompute else LayerKV(*(part.to(device) for part in _kv(reading, layer)))
                for layer in range(sender.layers)
            )
            edges = {} if e_cache_layer is None else {e_cache_layer: _e_cache(reading, e_cache_layer).to(device)}
            stored = reading.tokens
        cache = prefill.partial_prefill(
            receiver_model, Prefix.of([context[:stored]], device), PrefixCache(kv, edges), recompute
        )
        if stored < len(context):
            with torch.inference_mode():
                forward = Forward(receiver_model, Prefix.of([context], device), new=len(context) - stored)
                forward.run(forward.embed(), range(forward.depth), cache)
        return cache


def _kv(reading: Reading, layer: int) -> LayerKV:
    return LayerKV(*reading.piece(layer_name(layer))[..., : reading.tokens, :])


def _e_cache(reading: Reading, layer: int) -> Tensor:
    return reading.piece(e_cache_name(layer))[:, : reading.tokens]


def _tokens(context: Sequence[int]) -> bytes:
    if not len(context):
        raise RequestError("an empty context has no KV cache; give at least one token")
    return token_bytes(context)


def _check_layer(layer: int, model: ModelIdentity) -> None:
    if not 0 <= layer < model.layers:
        raise RequestError(f"{model} has layers 0 to {model.layers - 1}, no layer {layer}")
