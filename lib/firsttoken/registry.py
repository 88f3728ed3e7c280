"""The experiments there are.

An experiment is a function ``(profile) -> Outcome`` somewhere in a system, with a pure function beside it that makes
the summary of its rows; naming both as text keeps the systems apart and the start quick.
"""

from __future__ import annotations

from firsttoken.study.errors import ProfileError
from firsttoken.study.experiment import LONG, Experiment
from firsttoken.study.foreign.schema import unknown

_PROGRESSIVE = "firsttoken.progressive.experiments"
_COLDSTART = "firsttoken.progressive.coldstart"
_RECOVERY = "firsttoken.progressive.recovery"
_ENGINE = "firsttoken.engine.experiments"
_CROSSPOINT = "firsttoken.crosspoint.experiments"
_KVREUSE = "firsttoken.kvreuse.experiments"
_CHUNKED = "firsttoken.chunked.experiments"
_SWARM = "firsttoken.swarm.experiments"
_TOGETHER = "firsttoken.together"

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "machine", "What this machine reaches", "00", "firsttoken.study.ceilings:experiment", "ceilings_summary"
        ),
        Experiment(
            "sizes", "What a block and its adapters weigh", "11", "firsttoken.progressive.sizes:sizes", "sizes_summary"
        ),
        Experiment(
            "layer_distance", "Which layers change least", "11", f"{_PROGRESSIVE}:layer_distance", "distance_summary"
        ),
        Experiment("stage_quality", "What each stage answers", "12", f"{_PROGRESSIVE}:stage_quality", "stage_summary"),
        Experiment(
            "healing_training",
            "The adapters that are served",
            "12",
            f"{_PROGRESSIVE}:healing_training",
            "training_summary",
            LONG,
        ),
        Experiment("healing_live", "Healing a pruned model", "12", f"{_PROGRESSIVE}:healing_live", "live_summary"),
        Experiment(
            "healing_controls",
            "What healing owes to what",
            "12",
            "firsttoken.progressive.controls:healing_controls",
            "controls_summary",
            LONG,
        ),
        Experiment(
            "cold_start",
            "From a cold disk to the first token",
            "13",
            f"{_COLDSTART}.experiments:cold_start",
            f"{_COLDSTART}.summary:cold_start_summary",
        ),
        Experiment(
            "cold_start_shapes",
            "The same with larger shapes",
            "13",
            f"{_COLDSTART}.experiments:cold_start_shapes",
            f"{_COLDSTART}.summary:shapes_summary",
            LONG,
        ),
        Experiment(
            "deferral_sweep",
            "How many layers may wait",
            "14",
            f"{_COLDSTART}.deferral:deferral_sweep",
            "deferral_summary",
        ),
        Experiment(
            "recovery_timeline",
            "Serving while it grows",
            "15",
            f"{_RECOVERY}.timeline:recovery_timeline",
            "timeline_summary",
        ),
        Experiment(
            "open_session",
            "A session that is open meanwhile",
            "16",
            f"{_RECOVERY}.open_session:open_session",
            "session_summary",
        ),
        Experiment(
            "precision_frontier",
            "Which bits may wait",
            "17",
            "firsttoken.progressive.planes.frontier:precision_frontier",
            "precision_summary",
        ),
        Experiment(
            "precision_start",
            "The first token from the first bits",
            "17",
            f"{_COLDSTART}.precision:precision_start",
            "precision_start_summary",
        ),
        Experiment(
            "refinement_under_load",
            "Planes merged under running generations",
            "17",
            f"{_RECOVERY}.refinement:refinement_under_load",
            "refinement_summary",
        ),
        Experiment(
            "environment",
            "What the engine runs on",
            "20",
            f"{_CROSSPOINT}.environment:environment",
            "environment_summary",
        ),
        Experiment(
            "throughput", "The engine beside others", "20", f"{_ENGINE}.throughput:throughput", "throughput_summary"
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
            "reuse_throughput",
            "What a shorter prefill is worth under load",
            "36",
            f"{_ENGINE}.reuse_throughput:reuse_throughput",
            "reuse_throughput_summary",
            reads=("prefill_latency",),
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
            "simulator_error",
            "The simulator against a real GPU",
            "42",
            f"{_CHUNKED}.simulator_error:simulator_error",
            "error_summary",
            LONG,
        ),
        Experiment(
            "swarm_survival",
            "Servers killed, stopped and cut off",
            "50",
            f"{_SWARM}.swarm_survival:swarm_survival",
            "survival_summary",
            ("quick", "full"),
        ),
        Experiment(
            "swarm_transport",
            "What the way through servers takes",
            "50",
            f"{_SWARM}.swarm_transport:swarm_transport",
            "transport_summary",
            ("quick", "full"),
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
            "swarm_churn",
            "A swarm whose servers come and go",
            "52",
            f"{_SWARM}.swarm_churn:swarm_churn",
            "churn_summary",
        ),
        Experiment(
            "one_engine",
            "Stages, stored prefixes and shared prompts on one engine",
            "60",
            f"{_TOGETHER}.one_engine:one_engine",
            "one_engine_summary",
        ),
        Experiment(
            "borrowed_start",
            "A start that borrows from a warm neighbour",
            "56",
            f"{_TOGETHER}.borrowed.experiment:borrowed_start",
            f"{_TOGETHER}.borrowed.summary:borrowed_start_summary",
        ),
        Experiment(
            "reuse_training",
            "Models to share between",
            "30",
            f"{_KVREUSE}.training:reuse_training",
            "training_summary",
            LONG,
        ),
    )
}


def find_experiment(name: str) -> Experiment:
    """The experiment ``name``. Raises ProfileError when there is none."""
    if name not in EXPERIMENTS:
        raise ProfileError(f"no experiment {name!r}; {unknown(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
