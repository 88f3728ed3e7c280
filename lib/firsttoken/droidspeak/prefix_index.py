"""Which stored prefix does a context begin with? Answered by blocks of tokens, as vLLM and LMCache do.

The digest of a block depends on the model, on the block and on all before it, so one look-up a block finds the longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Hit(NamedTuple):
    """The entry ``key`` holds the first ``tokens`` tokens of a context."""

    key: str
    tokens: int


def token_bytes(context: Sequence[int]) -> bytes:
    """Token ids as little-endian int64, the form in which they are hashed and kept."""
    return np.asarray(context, dtype="<i8").tobytes()


class PrefixIndex:
    """Entries by the digests of their blocks of ``block_tokens`` tokens.

    A last block that is not full is found only by a context that ends where the entry does.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._holders: dict[bytes, dict[str, None]] = {}  # inner: entry keys, in the order of coming

    def add(self, key: str, model: str, tokens: bytes) -> None:
        """Entry ``key`` holds ``tokens`` (see ``token_bytes``) as the model of key ``model`` computed them."""
        for _, digest in self._chain(model, tokens):
            self._holders.setdefault(digest, {})[key] = None

    def remove(self, key: str, model: str, tokens: bytes) -> None:
        """Undo what ``add`` did for ``key``."""
        for _, digest in self._chain(model, tokens):
            self._holders[digest].pop(key)
            if not self._holders[digest]:
                del self._holders[digest]

    def longest(self, model: str, tokens: bytes, wanted: Callable[[str], bool] = lambda key: True) -> Hit | None:
        """The ``wanted`` entry of ``model`` that shares most of ``tokens``, the newest of several."""
        for count, digest in reversed(self._chain(model, tokens)):
            for key in reversed(self._holders.get(digest, {})):
                if wanted(key):
                    return Hit(key, count)
        return None

    def _chain(self, model: str, tokens: bytes) -> list[tuple[int, bytes]]:
        """(tokens so far, digest) after each block."""
        chain, digest, width = [], model.encode(), 8 * self.block_tokens
        for start in range(0, len(tokens), width):
            block = tokens[start : start + width]
            digest = hashlib.sha256(digest + block).digest()
            chain.append(((start + len(block)) // 8, digest))
        return chain
