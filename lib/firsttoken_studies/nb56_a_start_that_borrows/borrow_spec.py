"""What a start of a replica is asked."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken_studies.progressiveserve.coldstart.spec import TrialSpec

WHOLE, PRUNED, BORROWED = "whole", "pruned", "borrowed"
WAYS = {WHOLE: "the whole model first", PRUNED: "ProgressiveServe's stage 1", BORROWED: "borrowing"}
"""The ways to start, whose clock begins when the libraries are imported."""


@dataclass(frozen=True)
class StartSpec(TrialSpec):
    """``tokens`` are generated, on ``cores`` (none: wherever the system likes); of n layers that have come ``taken[n]``
    are taken over (none: all)."""

    tokens: int = 1
    cores: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()


@dataclass(frozen=True)
class BorrowSpec(StartSpec):
    """``variant`` is one of WAYS; ``neighbour`` is the address of a server of all layers, for a start that borrows."""

    neighbour: str = ""
