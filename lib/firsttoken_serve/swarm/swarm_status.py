"""A running swarm as one of its clients sees it, for people to look at: who holds which blocks, and how it stands."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from firsttoken.petals.chain import Chain
from firsttoken.petals.contacts import line_of
from firsttoken.petals.records import Record
from firsttoken.petals.server_session import ServerSession

MOST_SERVERS, MOST_REPLACED, MOST_TEXT = 64, 20, 160  # that are told: records and reasons are what strangers sent
_STATES = ("serves", "shunned", "silent", "convicted", "another version")


def swarm_status(chain: Chain, now: float) -> dict[str, Any]:
    """What is known of the swarm of ``chain`` at ``now`` (``steady_s``), as JSON takes it.

    ``servers``, those of the chain first, ``more`` that are left out, the blocks that are ``unserved``, and who was
    ``replaced`` by whom. Of ``audits`` it says how many ended how, and why the last one showed nothing. A server's
    ``requests`` are this client's that are open there, ``served`` their tokens x blocks, ``throughput`` tokens/s
    through one block as it says itself.
    """
    swarm, auditor, asked, sessions = chain.swarm, chain.auditor, defaultdict(list), list(chain.sessions)
    for session, record in sessions:
        asked[record.server].append(session)
    known = {record.server: record for _, record in sessions}  # also one whose record has expired meanwhile
    known |= {one.server: one for one in swarm.registry.live(now) if one.span}
    states = {server: swarm.state(one) for server, one in known.items()}

    def rank(one: Record) -> tuple[Any, ...]:
        first = min((session.layers.start for session in asked.get(one.server, ())), default=len(chain.layers))
        return first, _STATES.index(states[one.server][0]), one.blocks, one.server

    return {
        "layers": len(chain.layers),
        "version": swarm.model,
        "servers": [
            _told(one, asked.get(one.server, ()), *states[one.server], swarm.registry.left_s(one.server, now))
            | {"served": swarm.served[one.server]}
            for one in sorted(known.values(), key=rank)[:MOST_SERVERS]
        ],
        "more": max(0, len(known) - MOST_SERVERS),
        "audits": None if auditor is None else {"ends": dict(auditor.ends), "undecided": _text(auditor.why)},
        "unserved": chain.unserved(),
        "replaced": [
            {"key": key, "why": _text(why), "by": [_named(record) | {"blocks": _ends(blocks)} for record, blocks in by]}
            for (key, why), by in list(zip(chain.faults, chain.heirs, strict=False))[-MOST_REPLACED:]
        ],
    }


def _told(
    one: Record, sessions: list[ServerSession], state: str, ping_s: float | None, left_s: float
) -> dict[str, Any]:
    return _named(one) | {
        "blocks": list(one.blocks),
        "version": one.model,
        "throughput": one.throughput,
        "state": state,
        "ping_s": ping_s,
        "asked": [_ends(session.layers) for session in sessions],
        "requests": max((len(session.known) for session in sessions), default=0),
        "expires_s": left_s,
    }


def _named(one: Record) -> dict[str, str]:
    return {"key": one.server, "address": _text(one.address)}


def _ends(blocks: range) -> list[int]:
    return [blocks.start, blocks.stop]


def _text(said: str) -> str:
    return line_of(said, MOST_TEXT)
