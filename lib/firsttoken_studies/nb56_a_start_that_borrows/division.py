"""Which layers each of several processes fetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from firsttoken.progressiveserve.checkpoint.manifest import Manifest
from firsttoken.progressiveserve.loading.read_plan import parts_of
from firsttoken.progressiveserve.loading.reader import even_groups
from firsttoken.study.errors import StageError


def divided(
    manifest: Manifest, count: int, divide: Callable[[Sequence[int], int], Sequence[range]] = even_groups
) -> list[range]:
    """The layers of ``count`` processes that bring about as many bytes each, of a checkpoint staged by ``ends_first``;
    the first has the ends, too, and so fewer layers (none, where the ends are its whole share). ``divide`` groups the
    ends and the layers, by their bytes.

    Raises StageError where one would have nothing to bring: there are too few layers.
    """
    parts = parts_of(manifest, [1])
    groups = divide([part.bytes for part in parts], count)
    if [part for group in groups for part in group] != [*range(len(parts))]:
        raise StageError(f"{count} processes bring {list(groups)}, and not each of {len(parts)} parts once, in order")
    if not all(groups) or len(groups) != count:
        raise StageError(f"{count} processes cannot share {len(parts) - 1} layers and the ends: take fewer")
    edges = [0, *(group[-1] for group in groups)]  # the ends are the part before layer 0
    return [range(first, stop) for first, stop in pairwise(edges)]


def bytes_of(manifest: Manifest, layers: range, with_ends: bool) -> int:
    """Bytes of ``layers``, and of the ends with them."""
    return sum(
        part.bytes for part in parts_of(manifest, [1]) if (with_ends if part.layer is None else part.layer in layers)
    )


def only(manifest: Manifest, layers: range) -> Manifest:
    """Return ``manifest`` with the parts of ``layers`` alone."""
    (stage,) = manifest.stages
    parts = tuple(part for part in stage.parts if part.layer in layers)
    return replace(manifest, stages=(replace(stage, parts=parts),))
