"""How preempted requests come back: the policies by name."""

from __future__ import annotations

import inspect
from typing import Any

from firsttoken.engine.preemption.bandwidth_only import BandwidthOnly
from firsttoken.engine.preemption.base import Action, Observation, PreemptionPolicy
from firsttoken.engine.preemption.cross_point import CrossPoint
from firsttoken.engine.preemption.online import OnlineCrossPoint
from firsttoken.engine.preemption.oracle import Oracle
from firsttoken.engine.preemption.recompute import Recompute
from firsttoken.engine.preemption.swap import Swap
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import unknown

__all__ = ["POLICIES", "Action", "Observation", "PreemptionPolicy", "make_policy"]

POLICIES: dict[str, type[PreemptionPolicy]] = {
    policy.name: policy for policy in (Swap, Recompute, CrossPoint, BandwidthOnly, OnlineCrossPoint, Oracle)
}


def make_policy(name: str, **parameters: Any) -> PreemptionPolicy:
    """The policy ``name``. Raises ProfileError for an unknown name, and for an unknown or missing parameter."""
    if name not in POLICIES:
        raise ProfileError(f"no preemption policy {name!r}; {unknown(name, POLICIES)}")
    policy = POLICIES[name]
    known = {} if policy.__init__ is object.__init__ else dict(inspect.signature(policy).parameters)
    for key in parameters:
        if key not in known:
            raise ProfileError(f"preemption policy {name}: unknown parameter {key!r}; {unknown(key, known)}")
    for key, entry in known.items():
        if entry.default is inspect.Parameter.empty and key not in parameters:
            raise ProfileError(f"preemption policy {name}: missing parameter {key!r}")
    return policy(**parameters)
