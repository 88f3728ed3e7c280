"""The experiments of this room. Another model's cache."""

from __future__ import annotations

from firsttoken.study.experiment import LONG, Experiment

_KVREUSE = "firsttoken_studies.droidspeak"

EXPERIMENTS = (
    Experiment(
        "layer_profile", "Which layers to recompute", "30", f"{_KVREUSE}.profiling:layer_profile", "profile_summary"
    ),
    Experiment(
        "transitions",
        "Why one contiguous group",
        "31",
        f"{_KVREUSE}.transitions:transitions",
        "transitions_summary",
    ),
    Experiment(
        "pipelined_loading",
        "E first, KV meanwhile",
        "32",
        f"{_KVREUSE}.loading:pipelined_loading",
        "loading_summary",
    ),
    Experiment(
        "prefill_latency",
        "How long each method computes",
        "33",
        f"{_KVREUSE}.latency:prefill_latency",
        "latency_summary",
    ),
    Experiment(
        "reuse_methods",
        "What each method answers",
        "33",
        f"{_KVREUSE}.methods:reuse_methods",
        f"{_KVREUSE}.method_summary:methods_summary",
    ),
    Experiment(
        "profile_transfer",
        "A profile on another task",
        "34",
        f"{_KVREUSE}.transfer:profile_transfer",
        "transfer_summary",
    ),
    Experiment(
        "adaptive_group", "A group for this link", "35", f"{_KVREUSE}.adaptive:adaptive_group", "adaptive_summary"
    ),
    Experiment("quality_gate", "A gate before the answer", "35", f"{_KVREUSE}.gating:quality_gate", "gate_summary"),
    Experiment(
        "reuse_training",
        "Models to share between",
        "30",
        f"{_KVREUSE}.training:reuse_training",
        "training_summary",
        LONG,
    ),
)
