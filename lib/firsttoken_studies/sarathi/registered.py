"""The experiments of this room. Prompts in pieces."""

from __future__ import annotations

from firsttoken.study.experiment import LONG, Experiment

_CHUNKED = "firsttoken_studies.sarathi"

EXPERIMENTS = (
    Experiment(
        "generation_stalls",
        "Running requests while a long prompt arrives",
        "40",
        f"{_CHUNKED}.generation_stalls:generation_stalls",
        "stalls_summary",
    ),
    Experiment(
        "serving_capacity",
        "How many requests a second within an objective",
        "41",
        f"{_CHUNKED}.serving_capacity:serving_capacity",
        "capacity_summary",
    ),
    Experiment(
        "pipeline_bubbles",
        "What chunks leave idle on a pipeline",
        "41",
        f"{_CHUNKED}.pipeline_bubbles:pipeline_bubbles",
        "pipeline_summary",
    ),
    Experiment(
        "batch_cost",
        "What a batch costs",
        "43",
        f"{_CHUNKED}.batch_cost:batch_cost",
        "batch_summary",
    ),
    Experiment(
        "changing_load",
        "Schedulers under a load that changes",
        "44",
        f"{_CHUNKED}.changing_load:changing_load",
        "changing_summary",
    ),
    Experiment(
        "simulator_error",
        "The simulator against a real GPU",
        "42",
        f"{_CHUNKED}.simulator_error:simulator_error",
        "error_summary",
        LONG,
    ),
    Experiment(
        "live_peer",
        "A live peer, asked the same",
        "45",
        f"{_CHUNKED}.live_peer:live_peer",
        "peer_summary",
        LONG,
    ),
)
