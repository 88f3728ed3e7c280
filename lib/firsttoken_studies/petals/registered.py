"""The experiments of this room. Layers on other machines."""

from __future__ import annotations

from firsttoken.study.experiment import Experiment

_SWARM = "firsttoken_studies.petals"

EXPERIMENTS = (
    Experiment(
        "swarm_survival",
        "Servers killed, stopped and cut off",
        "50",
        f"{_SWARM}.swarm_survival:swarm_survival",
        "survival_summary",
        ("quick", "review", "full"),
        in_turns=True,
    ),
    Experiment(
        "swarm_transport",
        "What the way through servers takes",
        "50",
        f"{_SWARM}.swarm_transport:swarm_transport",
        "transport_summary",
        ("quick", "review", "full"),
        in_turns=True,
    ),
    Experiment(
        "eight_bits",
        "Weights and hidden states in 8 bits",
        "51",
        f"{_SWARM}.eight_bits:eight_bits",
        "eight_bits_summary",
    ),
    Experiment(
        "swarm_chains",
        "A chain of servers beside offloading",
        "52",
        f"{_SWARM}.swarm_chains:swarm_chains",
        "chains_summary",
    ),
    Experiment(
        "swarm_tuning",
        "Training through frozen servers",
        "53",
        f"{_SWARM}.swarm_tuning:swarm_tuning",
        "tuning_summary",
        in_turns=True,
    ),
    Experiment(
        "swarm_churn",
        "A swarm whose servers come and go",
        "52",
        f"{_SWARM}.swarm_churn:swarm_churn",
        "churn_summary",
    ),
    Experiment(
        "swarm_validation",
        "Servers that lie, and clients that look",
        "54",
        f"{_SWARM}.swarm_validation:swarm_validation",
        "validation_summary",
        ("quick", "review", "full"),
    ),
    Experiment(
        "swarm_privacy",
        "Tokens read from hidden states",
        "54",
        f"{_SWARM}.swarm_privacy:swarm_privacy",
        "privacy_summary",
    ),
)
