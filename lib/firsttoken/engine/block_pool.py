"""Numbered blocks: who has which is kept here, and nowhere else (after PagedAttention, Kwon et al., SOSP 2023)."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile

from firsttoken.engine.request import Request, ScheduledChunk
from firsttoken.study.errors import RequestError


class BlockPool:
    """``count`` numbered blocks, each with none, one or several owners.

    ``watermark`` blocks are held back from those who ask for less than they may need later (admission): vLLM keeps 1 %
    to preempt less often, CPS switches it off (3.1). A block with a key can be found and shared by whoever wants what
    it holds, also when nobody has it: until blocks without a key are used up, and it was given back before the others.
    """

    def __init__(self, count: int, watermark: int = 0) -> None:
        if count < 1 or not 0 <= watermark < count:
            raise RequestError(f"block pool: {count} blocks with {watermark} held back; keep at least one to give out")
        self.count = count
        self.watermark = watermark
        self._owners = [0] * count
        self._blank = list(range(count - 1, -1, -1))  # nobody's, without a key; the last in is the first out
        self._evictable: OrderedDict[int, None] = OrderedDict()  # nobody's, with a key; the first in is the first out
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """The number of blocks without an owner."""
        return len(self._blank) + len(self._evictable)

    def owners(self, block: int) -> int:
        """The number of owners of ``block``."""
        return self._owners[block]

    def allocate(self, wanted: int, *, admission: bool = False, shared: Sequence[int] = ()) -> list[int] | None:
        """Take the ``shared`` blocks, which hold what is wanted already, and ``wanted`` blocks without an owner.

        Return None when there are not so many. For an ``admission`` the watermark stays free.
        """
        idle = [block for block in shared if not self._owners[block]]
        if wanted + len(idle) > self.free - (self.watermark if admission else 0):
            return None
        # Shared blocks that nobody has leave the queue before any block is evicted from it: an eviction could otherwise
        # forget what one of them holds and hand it out a second time.
        for block in idle:
            del self._evictable[block]
        blank = self._blank[: -wanted - 1 : -1]
        del self._blank[len(self._blank) - len(blank) :]
        taken = [*shared, *blank, *(self._evict() for _ in range(wanted - len(blank)))]
        for block in taken:
            self._owners[block] += 1
        return taken

    def release(self, blocks: Iterable[int], *, first_out: bool = False) -> None:
        """Give blocks back; with ``first_out`` those with a key are evicted before all others. Raises RequestError for
        one that was not taken: two owners would share its keys."""
        for block in list(blocks) if first_out else reversed(list(blocks)):  # of a prefix, the end is evicted first
            if not 0 <= block < self.count or not self._owners[block]:
                raise RequestError(f"block pool: block {block} was given back, but nobody has it")
            self._owners[block] -= 1
            if not self._owners[block]:
                if block in self._keys:
                    self._evictable[block] = None
                    self._evictable.move_to_end(block, last=not first_out)
                else:
                    self._blank.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Register ``block``, which has an owner and is complete, by ``key``; of two blocks of a key the first is
        found."""
        if key not in self._blocks:
            self._blocks[key], self._keys[block] = block, key

    def published(self, block: int) -> bool:
        """Return whether ``block`` can be found, so that others may have it too, and nobody writes to it."""
        return block in self._keys

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the first ``keys``, up to the first key that no block has."""
        return [self._blocks[key] for key in takewhile(self._blocks.__contains__, keys)]

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Withdraw the keys of ``blocks``, which have owners, so that they are not found any more."""
        for block in blocks:
            if (key := self._keys.pop(block, None)) is not None:
                del self._blocks[key]

    def check(self) -> None:
        """Assert that every block is free or has owners, none is both or twice, and keys and blocks are pairs."""
        free = [*self._blank, *self._evictable]
        assert len(free) == len(set(free)), "a block is free twice"
        assert sorted(free) == [block for block, owners in enumerate(self._owners) if not owners], "a block is lost"
        assert self._blocks == {key: block for block, key in self._keys.items()}, "a block is found by another's key"
        assert set(self._evictable) == set(free) & set(self._keys), "a block is kept without a key, or blank with one"

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block


# Prefix sharing: who begins like another shares its full blocks (after vLLM's automatic prefix caching).

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
        self.query_tokens = 0  # of admitted requests
        self.hit_tokens = 0  # of these, those that came from shared blocks and were not computed

    def find(self, request: Request) -> list[int]:
        """Return blocks that hold what ``request`` begins with. A prompt whose likelihoods are asked for gets none, as
        these come from computing it."""
        start = self._salt(request).encode()
        if not request.keys or request.keys[0] != start:
            request.keys = [start]
        if request.sampling.prompt_logprobs:
            return []
        # what comes before the first draft is computed, as it says what the draft is held to
        full = (len(request.tokens) - request.draft_count - 1) // self._block_tokens
        return self._pool.find(block_keys(request, self._block_tokens, full))

    def admitted(self, request: Request, blocks: int) -> None:
        """Note that ``request`` was given so many of the found ``blocks``."""
        request.published = blocks
        request.advance(blocks * self._block_tokens)
        self.query_tokens += len(request.tokens)
        self.hit_tokens += request.cached

    def returned(self, request: Request) -> None:
        """Note that ``request`` is back from the host, in other blocks, which nothing is known of yet."""
        if request.published < _NEVER:
            request.published = 0

    def stop_sharing(self, request: Request) -> None:
        """Share no more of ``request``: what it computes from now on follows keys and values of another version."""
        request.published = _NEVER

    def publish(self, chunk: ScheduledChunk) -> None:
        """Share the blocks that ``chunk`` fills with requests that are admitted after it, in its step too: there each
        layer writes all keys and values before it reads any. Drafts are not shared, as they may be taken back."""
        request = chunk.request
        full = min(chunk.end, len(request.tokens) - request.draft_count) // self._block_tokens
        if request.published >= full:
            return
        keys = block_keys(request, self._block_tokens, full)[request.published :]
        for block, key in zip(request.blocks[request.published : full], keys, strict=True):
            self._pool.publish(block, key)
        request.published = full

    def withdraw(self, chunk: ScheduledChunk) -> list[int]:
        """Withdraw the keys of blocks that ``chunk``, which was not computed, should have filled; return these
        blocks."""
        request, full = chunk.request, chunk.start // self._block_tokens
        if request.published < _NEVER:
            request.published = min(request.published, full)
        self._pool.withdraw(request.blocks[full:])
        return request.blocks[full:]


def block_keys(request: Request, size: int, full: int) -> list[bytes]:
    """The keys of the first ``full`` blocks of ``size`` tokens of ``request``, whose ``keys`` begin with a salt."""
    keys = request.keys
    for block in range(len(keys) - 1, full):
        tokens = array("q", request.tokens[block * size : (block + 1) * size])
        keys.append(blake2b(keys[-1] + tokens.tobytes(), digest_size=32).digest())
    return keys[1 : full + 1]
