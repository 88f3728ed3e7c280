"""The preemption policies by name, which say when to swap and when to recompute; the engine's two static ones are among
them."""

from __future__ import annotations

from typing import Any

from firsttoken.cps.policies.cross_point import BandwidthOnly, BothEnds, CrossPoint, Oracle
from firsttoken.cps.policies.online import OnlineCrossPoint
from firsttoken.engine.preemption import POLICIES as STATIC
from firsttoken.engine.preemption import PreemptionPolicy, policy_of

POLICIES: dict[str, type[PreemptionPolicy]] = STATIC | {
    policy.name: policy for policy in (CrossPoint, BandwidthOnly, BothEnds, OnlineCrossPoint, Oracle)
}


def make_policy(name: str, **parameters: Any) -> PreemptionPolicy:
    """The policy ``name``. Raises ProfileError for an unknown name, and for an unknown or missing parameter."""
    return policy_of(POLICIES, name, parameters)
