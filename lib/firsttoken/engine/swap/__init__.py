"""Swapping: preempted requests keep their KV cache in host memory until there is room again."""

from __future__ import annotations

from firsttoken.engine.kv import KVPool
from firsttoken.engine.swap.block_copier import SwapPath
from firsttoken.engine.swap.coalesced import Coalesced, Overlapped
from firsttoken.engine.swap.host_pool import HostPool
from firsttoken.engine.swap.per_block import PerBlock
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown

PATHS: dict[str, type[SwapPath]] = {path.name: path for path in (PerBlock, Coalesced, Overlapped)}


def make_path(name: str, pool: KVPool, host_pool: HostPool) -> SwapPath:
    """The swap path ``name`` between ``pool`` and ``host_pool``. Raises ProfileError for a name that no path has."""
    if name not in PATHS:
        raise ProfileError(f"no swap path {name!r}; {unknown(name, PATHS)}")
    return PATHS[name](pool, host_pool)
