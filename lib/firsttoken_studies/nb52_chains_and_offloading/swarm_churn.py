"""Hundreds of joins, leaves and deaths: how soon a swarm is back at 90 % of what its servers could, by rule."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from firsttoken.petals.placement import Rebalancing, block_rates, interval_to_join, most_rate
from firsttoken.petals.routing import Reachable
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken_extras.min_move_rebalancing.rule import MinMoveRebalancing
from firsttoken_studies.record.results import Outcome, Rows, frame_of

# A swarm in which servers come, leave and die, simulated second by second on the rules that real servers follow.
#
# Everybody decides on records: what others announced, ``gossip_s`` ago or earlier, of the dead as well until they
# expire. A server that wants to move announces it, waits, and goes only if the move is still wanted with all counted
# that announced before.

JoiningRule: TypeAlias = Callable[[Sequence[Reachable], int, int], range]  # (servers, depth, count) -> its blocks


@dataclass(frozen=True)
class ChurnConfig:
    """A swarm over ``depth`` blocks, seconds throughout.

    Every server asks once a ``period_s`` whether to move, by ``rule``; with ``hears_s`` it also asks within as many
    after somebody came or went. A changed record is seen by others after ``gossip_s``, one that is not renewed is
    dropped after ``expiry_s``. Blocks take ``load_s`` to load, in which a server serves nothing; between announcing a
    move and making it lie ``settle_s``. Raises ProfileError for impossible times.
    """

    depth: int
    period_s: float = 120.0
    rule: Rebalancing = field(default_factory=Rebalancing)
    hears_s: float = 0.0
    gossip_s: float = 1.0
    settle_s: float = 2.0
    expiry_s: float = 30.0
    load_s: float = 5.0
    join: JoiningRule = interval_to_join  # the blocks that a server takes when it comes

    def __post_init__(self) -> None:
        if self.depth < 1 or min(self.period_s, self.expiry_s) <= 0 or min(self.gossip_s, self.settle_s) < 0:
            raise ProfileError("churn: depth, period_s and expiry_s must be above 0, gossip_s and settle_s 0 or more")
        if self.load_s < 0 or self.load_s + self.settle_s >= self.period_s:
            raise ProfileError("churn: a server must settle and load within its period; raise period_s")


@dataclass
class _Simulated:
    """The state of a server, and its announcements ``said``: (when, its record or None for gone), oldest first."""

    record: Reachable
    said: list[tuple[float, Reachable | None]]
    serves: bool = False
    alive: bool = True
    expires_s: float = float("inf")  # of a dead one
    wants: tuple[float, str] | None = None  # when it announced a move that it has not made, and who it is


@dataclass
class Churn:
    """The swarm at ``now_s``.

    ``history`` holds (second, rate, most that its living servers could have, unserved blocks) after each change;
    ``in_vain`` counts the moves that another, announced before and not seen yet, had made needless.
    """

    config: ChurnConfig
    seed: int = 0
    now_s: float = 0.0
    moves: int = 0
    in_vain: int = 0
    history: list[tuple[float, float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._servers: dict[str, _Simulated] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def living(self) -> list[Reachable]:
        """The records of the servers that are there, loading ones too."""
        return [server.record for server in self._servers.values() if server.alive]

    def join(self, name: str, count: int, throughput: float) -> None:
        """Add a server of ``count`` blocks, which chooses them by what it sees, and again when it has waited for
        others."""
        blocks = self.config.join(self.seen(), self.config.depth, count)
        record = Reachable(name, blocks, 0.0, throughput)
        self._servers[name] = _Simulated(record, [(self.now_s, record)], wants=(self.now_s, name))
        self._after(self.config.settle_s, lambda: self._join(name))
        self._after(self.config.settle_s + self._rng.uniform(0, self.config.period_s), lambda: self._check(name))
        self._spread(self.config.gossip_s + self.config.settle_s)
        self._note()

    def leave(self, name: str, *, says_so: bool) -> None:
        """Remove server ``name``; unless it ``says_so`` it is seen until its last record expires."""
        server = self._servers[name]
        server.alive = server.serves = False
        if says_so:
            server.said.append((self.now_s, None))
        else:
            server.expires_s = self.now_s + self.config.expiry_s * self._rng.uniform(0.5, 1)  # renewed twice an expiry
        self._spread(self.config.gossip_s if says_so else server.expires_s - self.now_s)
        self._note()

    def run(self, until_s: float) -> None:
        """Advance the time to ``until_s``, with all that happens until then."""
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._agenda)
            act()
        self.now_s = until_s

    def seen(
        self, without: str = "", before: tuple[float, str] | None = None, gossip_s: float | None = None
    ) -> list[Reachable]:
        """The records that anybody sees now, except of ``without``; of moves that are only announced those that were
        earlier than ``before``, of one second those of the first name. News travel for ``gossip_s``."""
        records, latest = [], self.now_s - (self.config.gossip_s if gossip_s is None else gossip_s)
        for name, server in self._servers.items():
            if name == without or self.now_s >= server.expires_s:
                continue
            later = before is not None and server.wants is not None and server.wants > before
            statements = server.said[:-1] if later else server.said
            record = next((record_said for when, record_said in reversed(statements) if when <= latest), None)
            if record is not None:
                records.append(record)
        return records

    def _join(self, name: str) -> None:
        server = self._servers[name]
        if not server.alive:
            return
        blocks = self.config.join(self.seen(name, server.wants), self.config.depth, len(server.record.blocks))
        server.record, server.wants = replace(server.record, blocks=blocks), None
        server.said.append((self.now_s, server.record))
        self._after(self.config.load_s, lambda: self._ready(name))

    def _spread(self, after_s: float) -> None:
        """Tell all servers in ``after_s`` of one that came or went; each asks soon after."""
        if self.config.hears_s:
            for name, server in self._servers.items():
                wait = after_s + self._rng.uniform(0, self.config.hears_s)
                if server.alive:
                    self._after(wait, lambda name=name: self._ask(name))

    def _check(self, name: str) -> None:
        if self._servers[name].alive:
            self._after(self.config.period_s, lambda: self._check(name))
            self._ask(name)

    def _ask(self, name: str) -> None:
        server = self._servers[name]
        if server.wants is not None:
            return
        target = self._wanted(server, self.seen(without=name)) if server.serves else None
        if target is not None:
            server.said.append((self.now_s, replace(server.record, blocks=target)))
            server.wants = (self.now_s, name)
            self._after(self.config.settle_s, lambda: self._decide(name, target))

    def _decide(self, name: str, target: range) -> None:
        """Move the server, or take its announcement back where an earlier one fills the gap."""
        server = self._servers[name]
        if not server.alive:
            return
        servers_seen, now = self.seen(name, server.wants), self.seen(name, server.wants, gossip_s=0.0)
        server.wants = None
        wanted = self._wanted(server, servers_seen)
        if wanted is None:
            server.said.append((self.now_s, server.record))
            return
        names = {server_record.name for server_record in servers_seen}
        self.in_vain += (
            self._wanted(server, [server_record for server_record in now if server_record.name in names]) is None
        )
        self.moves += 1
        server.record = replace(server.record, blocks=target)
        server.serves = False
        self._after(self.config.load_s, lambda: self._ready(name))
        self._note()

    def _wanted(self, server: _Simulated, others: list[Reachable]) -> range | None:
        return self.config.rule.move(server.record.name, [*others, server.record], self.config.depth)

    def _ready(self, name: str) -> None:
        self._servers[name].serves = self._servers[name].alive
        self._note()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (self.now_s + seconds, self._count, act))

    def _note(self) -> None:
        rates = block_rates((server.record for server in self._servers.values() if server.serves), self.config.depth)
        most = most_rate(self.living, self.config.depth)
        self.history.append((self.now_s, float(rates.min()), most, int((rates <= 0).sum())))


RULES: dict[str, dict[str, Any]] = {
    "paper": {"rule": Rebalancing()},
    "fewest": {"rule": MinMoveRebalancing(), "hears_s": 30.0},
}
SHARE = 0.9  # of what no placement can exceed
_KINDS = ((4, 1.0), (5, 1.6), (6, 2.0), (8, 2.5), (10, 3.0))  # blocks, tokens a second through them


@dataclass(frozen=True)
class ChurnStudyConfig:
    """``servers`` of five kinds over ``depth`` blocks; after each of ``events`` (one to three leave, die or join at
    once) two periods of quiet; by each of ``rules`` and for each of ``seeds`` draws. ProfileError for what is none."""

    servers: int
    depth: int
    events: int
    seeds: int
    period_s: float
    rules: tuple[str, ...]

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule not in RULES:
                raise ProfileError(f"churn.rules: no rule {rule!r}; {unknown(rule, RULES)}")
        if min(self.servers, self.events, self.seeds) < 1 or self.depth < max(blocks for blocks, _ in _KINDS):
            raise ProfileError("churn: servers, events and seeds must be at least 1, depth at least 10")


def swarm_churn(profile: Profile, *, join: JoiningRule = interval_to_join) -> Outcome:
    """Rows {seed, rule, event, kind, servers, back_s, unserved_s, share_after, moves, in_vain}; ``back_s`` is
    None where the rate was not back after two periods. ``join`` chooses the blocks of a server that comes."""
    config = profile.section("churn", ChurnStudyConfig)
    rows: Rows = []
    cases = itertools.product(range(profile.seed, profile.seed + config.seeds), config.rules)
    for seed, rule in track(list(cases), desc="churn"):
        rows += [{"seed": seed, "rule": rule} | row for row in churned(config, seed, RULES[rule] | {"join": join})]
    return Outcome(rows, provenance={"source": "simulated servers", "kind": "simulated"})


def churned(config: ChurnStudyConfig, seed: int, rule: Mapping[str, Any]) -> Rows:
    """One swarm from its growth through all events, by the settings ``rule`` of ``ChurnConfig``; the draws are the same
    for every rule."""
    rng = np.random.default_rng(seed)
    churn = Churn(ChurnConfig(config.depth, config.period_s, **rule), seed)
    names = (f"s{number:05}" for number in itertools.count())

    def join() -> None:
        blocks, rate = _KINDS[rng.integers(len(_KINDS))]
        churn.join(next(names), blocks, blocks * rate)

    for _ in range(config.servers):
        join()
        churn.run(churn.now_s + 5)
    churn.run(churn.now_s + 4 * config.period_s)
    rows: Rows = []
    for event in range(config.events):
        event_s, before, moves, vain = churn.now_s, len(churn.history) - 1, churn.moves, churn.in_vain
        living, count = [server.name for server in churn.living], int(rng.integers(1, 4))
        kind = ("leave", "die", "join")[rng.integers(3)] if len(living) > 0.75 * config.servers else "join"
        kind = "leave" if len(living) > 1.25 * config.servers else kind
        for name in [None] * count if kind == "join" else rng.choice(living, count, replace=False):
            if name is None:
                join()
            else:
                churn.leave(str(name), says_so=kind == "leave")
        churn.run(event_s + 2 * config.period_s)
        until = _until(churn.history[before + 1 :], event_s, churn.now_s)
        row = {"event": event, "kind": kind, "servers": len(churn.living), **until}
        row |= {"moves": churn.moves - moves, "in_vain": churn.in_vain - vain}
        rows.append(row)
    return rows


def _until(history: list[tuple[float, float, float, int]], at_s: float, end_s: float) -> dict[str, float | None]:
    """Return the seconds from ``at_s`` until the rate is back for good, and until no block is unserved.

    The third entry is the share of the best rate that is reached at the end.
    """
    end_times_s = [*(moment for moment, *_ in history[1:]), end_s]
    low = [end for end, (_, rate, most, _) in zip(end_times_s, history, strict=True) if rate < SHARE * most]
    unserved = [end for end, (*_, gaps) in zip(end_times_s, history, strict=True) if gaps]
    back = (low[-1] if low else at_s) - at_s
    return {
        "back_s": back if back < end_s - at_s else None,
        "unserved_s": (unserved[-1] if unserved else at_s) - at_s,
        "share_after": history[-1][1] / history[-1][2],
    }


def churn_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by rule the events after which the rate is back within a period, the share that it comes to, the
    longest gap, moves an event, and moves in vain."""
    summary, events, period = Summary(), frame_of(rows), parameters["churn"]["period_s"]
    events["back"] = events.back_s.astype(float) <= period  # None, which is never, is no number
    of_events = {
        "back_within_a_period_pct": ("back", "mean", "%", 100),
        "share_after_pct": ("share_after", "mean", "%", 100),
        "moves_an_event": ("moves", "mean", ""),
    }
    for rule, rule_rows in events.groupby("rule", sort=False):
        summary.by(rule_rows, {}, of_events, variant=rule)
        longest = {"value": rule_rows.unserved_s.max() / period, "n": len(rule_rows)}
        summary.add("longest_unserved_periods", longest, variant=rule)
        summary.add("moves_in_vain", {"value": rule_rows.in_vain.sum(), "n": len(rule_rows)}, variant=rule)
    return summary
