"""Two servers or more of each span, in processes that may be broken; the dead are replaced by new ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from firsttoken.petals.swarm import Swarm
from firsttoken.study.errors import SwarmError
from firsttoken_studies.petals.member import SwarmMember

_TOGETHER_S = 60.0  # within which a swarm has to come together


class Fleet:
    """``spares`` + 1 servers of each of ``spans`` (a:b) of the model in ``folder``, links of ``delay_s`` each way.

    ``door`` is a member to ask for the others, ``members`` are all by the address that others know.
    """

    def __init__(self, folder: Path, spans: Sequence[str], delay_s: float = 0.0, spares: int = 1) -> None:
        self.folder, self.spans, self.spares, self._delay_s = folder, tuple(spans), spares, delay_s
        self.members: dict[str, SwarmMember] = {}
        try:
            self.door = self.start(self.spans[0]).ready().address
            for blocks in (*self.spans[1:], *self.spans * spares):
                self.start(blocks)
            self.settle()
        except BaseException:
            self.close()  # nobody else knows of those that did start
            raise

    def start(self, blocks: str) -> SwarmMember:
        """One more server, on its way."""
        member = SwarmMember(self.folder, blocks, list(self.members), self._delay_s)
        self.members[member.address] = member
        return member

    def settle(self) -> None:
        """Wait until all serve."""
        for member in self.members.values():
            member.ready()

    def known_to(self, swarm: Swarm) -> None:
        """Wait until a client knows all servers of each span as ones that answer. Raises SwarmError after a minute."""
        until = time.monotonic() + _TOGETHER_S
        while time.monotonic() < until:
            counts = Counter(one.blocks for one in swarm.servers() if one.address in self.members)
            if len(counts) == len(self.spans) and min(counts.values()) > self.spares:
                return
            time.sleep(0.02)
        raise SwarmError(f"the swarm did not come together: {dict(counts)} of {', '.join(self.spans)}")

    def replace(self, member: SwarmMember) -> None:
        """Another in the place of one that is dead."""
        del self.members[member.address]
        if member.address == self.door:
            self.door = next(iter(self.members))
        member.close()
        self.start(member.blocks)

    def close(self) -> None:
        """End all."""
        for member in self.members.values():
            member.close()
