"""Prefix sharing: who begins like another shares its full blocks (after vLLM's automatic prefix caching)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from hashlib import blake2b

from firsttoken.engine.blocks import BlockPool
from firsttoken.engine.request import Request
from firsttoken.engine.work import Work

_NEVER = sys.maxsize  # blocks published of a request of which none ever shall


class PrefixSharing:
    """Finds blocks of ``pool`` by the tokens up to their end, and publishes those that a step fills.

    A block's key is a digest of its tokens and of the key before it; the first follows ``salt(request)``, which says
    what else decides its keys and values (an adapter, a view). Only full blocks are shared, and never the one of a
    request's last token, which has to be computed: nobody writes to a block that another reads, so nothing is ever
    copied on a write.
    """

    def __init__(self, pool: BlockPool, block_tokens: int, salt: Callable[[Request], str]) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._salt = salt
        self.asked_tokens = 0
        self.found_tokens = 0

    @property
    def hit_rate(self) -> float:
        """The share of tokens that needed not be computed, of all that admitted requests came with."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def find(self, request: Request) -> list[int]:
        """Blocks that hold what ``request`` begins with; none for a prompt whose chances are asked for, as computing
        it is how they come."""
        start = self._salt(request).encode()
        if not request.keys or request.keys[0] != start:
            request.keys = [start]
        if request.sampling.prompt_logprobs:
            return []
        return self._pool.find(self._keys(request, (len(request.tokens) - 1) // self._block_tokens))

    def admitted(self, request: Request, blocks: int) -> None:
        """``request`` has been given so many found ``blocks``."""
        request.published = blocks
        request.advance(blocks * self._block_tokens)
        self.asked_tokens += len(request.tokens)
        self.found_tokens += request.cached

    def returned(self, request: Request) -> None:
        """``request`` is back from the host, in other blocks, which nobody knows yet."""
        if request.published < _NEVER:
            request.published = 0

    def part(self, request: Request) -> None:
        """What ``request`` computes from now on stands on keys and values of another view: nobody may share it."""
        request.published = _NEVER

    def publish(self, work: Work) -> None:
        """Who is admitted after ``work`` may share what it fills, in its step too: there each layer writes all keys and
        values before it reads any."""
        request, full = work.request, work.end // self._block_tokens
        if request.published >= full:
            return
        keys = self._keys(request, full)[request.published :]
        for block, key in zip(request.blocks[request.published : full], keys, strict=True):
            self._pool.publish(block, key)
        request.published = full

    def withdraw(self, work: Work) -> list[int]:
        """``work`` was not done; the blocks that do not hold what it was to write."""
        request, full = work.request, work.start // self._block_tokens
        if request.published < _NEVER:
            request.published = min(request.published, full)
        self._pool.withdraw(request.blocks[full:])
        return request.blocks[full:]

    def _keys(self, request: Request, full: int) -> list[bytes]:
        """The keys of the first ``full`` blocks."""
        keys, size = request.keys, self._block_tokens
        for block in range(len(keys) - 1, full):
            tokens = array("q", request.tokens[block * size : (block + 1) * size])
            keys.append(blake2b(keys[-1] + tokens.tobytes(), digest_size=32).digest())
        return keys[1 : full + 1]
