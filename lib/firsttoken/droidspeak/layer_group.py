"""The layers that a receiver computes again: one contiguous group (DroidSpeak, 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.study.errors import RequestError


@dataclass(frozen=True, order=True)
class Group:
    """Layers [lo, hi), 0-based, that the receiver recomputes; lo = hi recomputes none."""

    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo

    def __contains__(self, layer: int) -> bool:
        return self.lo <= layer < self.hi

    def __str__(self) -> str:
        return f"{self.lo}-{self.hi - 1}" if len(self) else "none"

    @property
    def layers(self) -> range:
        return range(self.lo, self.hi)

    @property
    def needs_e_cache(self) -> bool:
        """Return whether the sender's hidden states are needed: layer 0 starts from the token ids."""
        return len(self) > 0 and self.lo > 0

    def check(self, depth: int) -> Group:
        """Return this group. Raises RequestError unless it fits a model of ``depth`` layers."""
        if not 0 <= self.lo <= self.hi <= depth:
            raise RequestError(f"group [{self.lo}, {self.hi}) does not fit {depth} layers; 0 <= lo <= hi <= {depth}")
        return self


NOTHING = Group(0, 0)
