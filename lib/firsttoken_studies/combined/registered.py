"""The experiments of this room. What the systems do for one another."""

from __future__ import annotations

from firsttoken.study.experiment import Experiment

_TOGETHER = "firsttoken_studies.combined"

EXPERIMENTS = (
    Experiment(
        "one_engine",
        "Stages, stored prefixes and shared prompts on one engine",
        "60",
        f"{_TOGETHER}.one_engine:one_engine",
        "one_engine_summary",
    ),
    Experiment(
        "under_chunks",
        "A long prompt under running streams",
        "40",
        f"{_TOGETHER}.under_chunks:under_chunks",
        "under_chunks_summary",
    ),
    Experiment(
        "borrowed_start",
        "A start that borrows from a warm neighbour",
        "56",
        f"{_TOGETHER}.borrowed.experiment:borrowed_start",
        f"{_TOGETHER}.borrowed.summary:borrowed_start_summary",
    ),
    Experiment(
        "parallel_start",
        "A start of several processes that each fetch a part",
        "56",
        f"{_TOGETHER}.fetchers.experiment:parallel_start",
        f"{_TOGETHER}.fetchers.summary:parallel_start_summary",
    ),
)
