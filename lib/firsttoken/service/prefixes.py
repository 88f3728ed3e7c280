"""Stored prefixes for the model that is served: keys and values computed before, in a folder of KV files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.link.shaped import Link
from firsttoken.service.service_config import ServiceConfig
from firsttoken.study.errors import FirstTokenError, StageError

if TYPE_CHECKING:
    import torch

    from firsttoken.droidspeak.source import StoredPrefix


def check_prefixes(config: ServiceConfig, staged: bool) -> None:
    """Raises StageError for a store that cannot be used: no folder, or for a model that comes in stages."""
    if config.prefix_store is None:
        return
    if not config.prefix_store.is_dir():
        raise StageError(f"serve: there is no folder {config.prefix_store}; name one that a KVStore has written")
    if staged:
        raise StageError("serve: stored prefixes are of a whole model, and this one comes in stages; leave them out")


def open_prefixes(
    folder: Path, store: Path, device: str, dtype: torch.dtype
) -> Callable[[Sequence[int]], StoredPrefix | None]:
    """What finds the longest prefix of a prompt that the model in ``folder``, computing in ``dtype``, has in ``store``.

    Caches of other models, and of this one in another dtype, are left alone. It hashes the weights and imports
    transformers, which takes seconds. Raises ModelError for a folder that transformers does not know, and CacheError
    for a store that cannot be read.
    """
    from transformers import AutoTokenizer

    from firsttoken.assets.checkpoint import combined_sha256, weight_files
    from firsttoken.assets.empty_model import build_on_meta
    from firsttoken.droidspeak.identity import identify
    from firsttoken.droidspeak.prefill import Group
    from firsttoken.droidspeak.source import StoredPrefix
    from firsttoken.droidspeak.store import KVStore

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    identity = identify(build_on_meta(folder, dtype), tokenizer, combined_sha256(weight_files(folder)))
    stored = KVStore(store, memory_bytes=0, disk_bytes=sys.maxsize)
    known = {"sender": identity, "receiver": identity, "group": Group(0, 0), "device": device}
    return partial(_find, partial(StoredPrefix, stored, **known))


def _find(source: Callable[..., StoredPrefix], prompt: Sequence[int]) -> StoredPrefix | None:
    try:
        return source(prompt, link=Link())  # a thread reads the file, and no step waits for it
    except FirstTokenError:  # nothing of it is stored
        return None
