"""Which blocks a server gives up for others: swarms that servers join, leave and die in (PETALS, 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from firsttoken.petals.placement import Rebalancing
from firsttoken.petals.routing import Reachable
from firsttoken.study.policy_file import PolicyFile, PolicyKind
from firsttoken.study.profile import Profile
from firsttoken_studies.nb52_chains_and_offloading.swarm_churn import RULES, ChurnStudyConfig, churned
from firsttoken_studies.trying.table import TrialTable, Values, held

EVENTS = 4  # of the profile's: by "fewest" each takes a second


def _moved(answer: Any, rule: Rebalancing, name: str, servers: Collection[Reachable], depth: int) -> str:
    count = next(len(server.blocks) for server in servers if server.name == name)
    fits = (
        isinstance(answer, range) and answer.step == 1 and len(answer) == count and 0 <= answer.start <= depth - count
    )
    return "" if answer is None or fits else f"move must return None or {count} blocks of {depth}, not {answer!r:.60}"


PLACEMENT = PolicyKind(
    "placement",
    Rebalancing,
    "write a subclass of firsttoken.petals.placement.Rebalancing with a method move",
    {"move": _moved},
)


class Stay(Rebalancing):
    """A rule by which no server ever moves."""

    def move(self, name: str, servers: Collection[Reachable], depth: int) -> None:
        """Return None: this server never moves."""


def tried_placement(path: str, profile: Profile, draws: range) -> TrialTable:
    """A server of the reader's rule asks once a period, as the paper's does."""
    file, config = PolicyFile.read(Path(path), PLACEMENT), profile.section("churn", ChurnStudyConfig)
    config = replace(config, events=min(config.events, EVENTS))

    def one(settings: Callable[[], dict[str, Any]], seed: int) -> Values:
        rows = churned(config, seed, settings())
        return {
            "slowest block, % of the most": 100 * float(np.mean([row["share_after"] for row in rows])),
            "some block unserved, s": float(np.mean([row["unserved_s"] for row in rows])),
            "moves an event": float(np.mean([row["moves"] for row in rows])),
        }

    siblings = {"stay": lambda: {"rule": Stay()}} | {name: lambda by=by: by for name, by in RULES.items()}
    own_rule = file.watched()
    setting = (
        f"{config.servers} simulated servers over {config.depth} blocks, {2 * config.period_s:g} s after each of "
        f"{config.events} times that one to three came, left or died; the most is what no placement exceeds"
    )
    return TrialTable(setting, held((path, lambda: {"rule": own_rule()}, file.judged), siblings, one, draws))
