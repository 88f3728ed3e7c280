"""The experiments of this room. Swap or recompute."""

from __future__ import annotations

from firsttoken.study.experiment import Experiment

_CROSSPOINT = "firsttoken_studies.cps"

EXPERIMENTS = (
    Experiment(
        "environment",
        "What the engine runs on",
        "20",
        f"{_CROSSPOINT}.environment:environment",
        "environment_summary",
    ),
    Experiment(
        "recovery_latency",
        "Swap or recompute",
        "21",
        f"{_CROSSPOINT}.recovery_latency:recovery_latency",
        "recovery_latency_summary",
    ),
    Experiment(
        "crosspoint_replayed",
        "The cross-point policy on the paper's costs",
        "22",
        f"{_CROSSPOINT}.policies_replayed:crosspoint_replayed",
        "replayed_summary",
    ),
    Experiment(
        "crosspoint_live",
        "The policies live, and the simulator's error",
        "22",
        f"{_CROSSPOINT}.policies_live:crosspoint_live",
        "live_summary",
    ),
    Experiment(
        "online_crosspoint", "A learnt threshold", "23", f"{_CROSSPOINT}.online:online_crosspoint", "online_summary"
    ),
)
