"""A link that dies."""

from __future__ import annotations

import threading

from firsttoken.link.shaped import UNSHAPED, Link, LinkConfig
from firsttoken.study.errors import LinkError


class DyingLink(Link):
    """One that dies once it has moved ``after_bytes``, and stays dead until ``restore``."""

    def __init__(self, after_bytes: int, config: LinkConfig = UNSHAPED) -> None:
        super().__init__(config)
        self._after, self._dying = after_bytes, threading.Lock()
        self._left: int | None = after_bytes

    def restore(self) -> None:
        """The wire is up again, and stays up."""
        with self._dying:
            self._left = None

    def _book(self, wanted: int) -> tuple[int, float]:
        with self._dying:
            if self._left is None:
                return super()._book(wanted)
            if not self._left:
                raise LinkError(f"the link died after {self._after} bytes")
            count, arrives = super()._book(min(wanted, self._left))
            self._left -= count
            return count, arrives
