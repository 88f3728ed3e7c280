"""Another model's cache at a replica that lacks layers: what a request takes of it.

DroidSpeak computes a group of layers again and takes the sender's keys and values below and above it. Above the group
that cannot be had while layers are borrowed: their lenders keep keys and values of their own, and compute a prefix from
the hidden states that enter them, which only the layers below can make. So the group is made to end with the model: the
request takes the cache below it, for layers that are here, and everything from its lower edge on is computed, here and
by the lenders. That edge is the highest one that the sender kept hidden states at, no layer above it being one of the
group's or one that is not here. Where this is the first layer nothing is saved, and the request computes its own
prefill.

Two other rules were considered. Waiting until all layers are here keeps the whole cache, and gives up the first token
that borrowing is for. Sending the cache to the lenders would move all of it through the link to them, for keys and
values that they can compute from one hidden state a token. A larger group is never worse in quality: more of the
layers are the receiver's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firsttoken.droidspeak.layer_group import Group
from firsttoken.engine.scheduler_state import KVSource
from firsttoken.study.errors import CacheError


def group_at(group: Group, edges: tuple[int, ...], first_borrowed: int, depth: int) -> Group:
    """The group that is computed again in the place of ``group`` where the first ``first_borrowed`` of ``depth`` layers
    are here and the sender kept hidden states at ``edges``; all layers where no edge is low enough.

    Raises RequestError for a group that does not fit.
    """
    group.check(depth)
    if first_borrowed >= depth:
        return group
    highest = min(group.lo, first_borrowed) if len(group) else first_borrowed
    return Group(max((edge for edge in edges if edge <= highest), default=0), depth)


@dataclass(frozen=True)
class PrefixOffer:
    """A sender's stored beginning of a request: ``source_of`` makes a source for any group that begins at one of the
    ``edges``, layers that the sender kept hidden states at; ``group`` is the one that the pair of models wants."""

    group: Group
    edges: tuple[int, ...]
    source_of: Callable[[Group], KVSource]

    def source_at(self, first_borrowed: int, depth: int) -> tuple[KVSource | None, str]:
        """Return the source that a request takes where the first ``first_borrowed`` of ``depth`` layers are here, or
        None and why."""
        group = group_at(self.group, self.edges, first_borrowed, depth)
        if len(group) == depth:
            return (
                None,
                f"no hidden states are kept at or below layer {min(self.group.lo or first_borrowed, first_borrowed)}",
            )
        try:
            return self.source_of(group), ""
        except CacheError as error:  # the sender has dropped it meanwhile
            return None, str(error)
