"""The static policies for preempted requests: always swap, or always recompute; ``cps`` says when which."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from firsttoken.engine.preemption.preemption_policy import Action, Observation, PreemptionPolicy
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.policy_file import PolicyKind

__all__ = ["POLICIES", "PREEMPTION", "Action", "Observation", "PreemptionPolicy", "Recompute", "Swap", "policy_of"]


class Swap(PreemptionPolicy):
    """Always swap: one of the two static policies that the paper compares with."""

    name = "swap"

    def choose(self, tokens: int, now_s: float) -> Action:
        return Action.SWAP


class Recompute(PreemptionPolicy):
    """Always recompute: what vLLM does with a request that has one sequence (errata I23)."""

    name = "recompute"

    def choose(self, tokens: int, now_s: float) -> Action:
        return Action.RECOMPUTE


POLICIES: dict[str, type[PreemptionPolicy]] = {policy.name: policy for policy in (Swap, Recompute)}

_NO_ACTION = "choose must return Action.SWAP, Action.RECOMPUTE or Action.BOTH_ENDS"
PREEMPTION = PolicyKind(
    "preemption policy",
    PreemptionPolicy,
    "write a subclass of firsttoken.engine.preemption.PreemptionPolicy with a method choose",
    {
        "choose": lambda answer, *_: "" if isinstance(answer, Action) else f"{_NO_ACTION}, not {answer!r:.60}",
        "observe": lambda *_: "",
    },
)


def policy_of(
    policies: Mapping[str, type[PreemptionPolicy]], name: str, parameters: Mapping[str, Any]
) -> PreemptionPolicy:
    """The one of ``policies`` that is called ``name``.

    Raises ProfileError for an unknown name, and for an unknown or missing parameter.
    """
    if name not in policies:
        raise ProfileError(f"no preemption policy {name!r}; {unknown(name, policies)}")
    policy = policies[name]
    accepted = {} if policy.__init__ is object.__init__ else dict(inspect.signature(policy).parameters)
    for key in parameters:
        if key not in accepted:
            raise ProfileError(f"preemption policy {name}: unknown parameter {key!r}; {unknown(key, accepted)}")
    for key, entry in accepted.items():
        if entry.default is inspect.Parameter.empty and key not in parameters:
            raise ProfileError(f"preemption policy {name}: missing parameter {key!r}")
    return policy(**parameters)
