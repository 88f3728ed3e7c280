"""The experiments there are, in the order of their notebooks.

An experiment is a function ``(profile) -> Outcome`` of a study, with a pure function beside it that makes the summary
of its rows. Both are named as text, so that the list is read without importing any study.
"""

from __future__ import annotations

from firsttoken.study.errors import ProfileError
from firsttoken.study.experiment import LONG, Experiment
from firsttoken.study.parsing.schema import unknown

_ON_A_CPU = ("quick", "review", "full")
_ALL = (
    Experiment(
        "machine", "What this machine reaches", "00", "firsttoken.study.roofline:experiment", "ceilings_summary"
    ),
    Experiment(
        "sizes",
        "What a block and its adapters weigh",
        "11",
        "firsttoken_studies.progressiveserve.sizes:sizes",
        "sizes_summary",
    ),
    Experiment(
        "layer_distance",
        "Which layers change least",
        "11",
        "firsttoken_studies.progressiveserve.layers:layer_distance",
        "distance_summary",
    ),
    Experiment(
        "stage_quality",
        "What each stage answers",
        "12",
        "firsttoken_studies.progressiveserve.layers:stage_quality",
        "stage_summary",
    ),
    Experiment(
        "healing_training",
        "The adapters that are served",
        "12",
        "firsttoken_studies.progressiveserve.layers:healing_training",
        "training_summary",
        LONG,
    ),
    Experiment(
        "healing_live",
        "Healing a pruned model",
        "12",
        "firsttoken_studies.progressiveserve.layers:healing_live",
        "live_summary",
    ),
    Experiment(
        "healing_controls",
        "What healing owes to what",
        "12",
        "firsttoken_studies.progressiveserve.ablations:healing_controls",
        "controls_summary",
        LONG,
    ),
    Experiment(
        "cold_start",
        "From a cold disk to the first token",
        "13",
        "firsttoken_studies.progressiveserve.coldstart.experiments:cold_start",
        "firsttoken_studies.progressiveserve.coldstart.summary:cold_start_summary",
    ),
    Experiment(
        "cold_start_shapes",
        "The same with larger shapes",
        "13",
        "firsttoken_studies.progressiveserve.coldstart.experiments:cold_start_shapes",
        "firsttoken_studies.progressiveserve.coldstart.summary:shapes_summary",
        LONG,
    ),
    Experiment(
        "deferral_sweep",
        "How many layers may wait",
        "14",
        "firsttoken_studies.progressiveserve.coldstart.layer_sweep:deferral_sweep",
        "deferral_summary",
    ),
    Experiment(
        "recovery_timeline",
        "Serving while it grows",
        "15",
        "firsttoken_studies.progressiveserve.timeline:recovery_timeline",
        "timeline_summary",
    ),
    Experiment(
        "open_session",
        "A session that is open meanwhile",
        "16",
        "firsttoken_studies.progressiveserve.open_session:open_session",
        "session_summary",
    ),
    Experiment(
        "precision_frontier",
        "Which bits may wait",
        "17",
        "firsttoken_studies.progressiveserve.frontier:precision_frontier",
        "precision_summary",
    ),
    Experiment(
        "precision_start",
        "The first token from the first bits",
        "17",
        "firsttoken_studies.progressiveserve.coldstart.bitplane_starts:precision_start",
        "precision_start_summary",
    ),
    Experiment(
        "refinement_under_load",
        "Planes merged under running generations",
        "17",
        "firsttoken_studies.progressiveserve.refinement:refinement_under_load",
        "refinement_summary",
    ),
    Experiment(
        "environment",
        "What the engine runs on",
        "20",
        "firsttoken_studies.cps.environment:environment",
        "environment_summary",
    ),
    Experiment(
        "throughput",
        "The engine beside others",
        "20",
        "firsttoken_studies.engine.throughput:throughput",
        "throughput_summary",
    ),
    Experiment(
        "recovery_latency",
        "Swap or recompute",
        "21",
        "firsttoken_studies.cps.recovery_latency:recovery_latency",
        "recovery_latency_summary",
    ),
    Experiment(
        "crosspoint_replayed",
        "The cross-point policy on the paper's costs",
        "22",
        "firsttoken_studies.cps.policy_comparison:crosspoint_replayed",
        "replayed_summary",
    ),
    Experiment(
        "crosspoint_live",
        "The policies live, and the simulator's error",
        "22",
        "firsttoken_studies.cps.policy_comparison:crosspoint_live",
        "live_summary",
    ),
    Experiment(
        "online_crosspoint",
        "A learnt threshold",
        "23",
        "firsttoken_studies.cps.learnt_threshold:online_crosspoint",
        "online_summary",
    ),
    Experiment(
        "layer_profile",
        "Which layers to recompute",
        "30",
        "firsttoken_studies.droidspeak.profiling:layer_profile",
        "profile_summary",
    ),
    Experiment(
        "reuse_training",
        "Models to share between",
        "30",
        "firsttoken_studies.droidspeak.training:reuse_training",
        "training_summary",
        LONG,
    ),
    Experiment(
        "transitions",
        "Why one contiguous group",
        "31",
        "firsttoken_studies.droidspeak.contiguous_groups:transitions",
        "transitions_summary",
    ),
    Experiment(
        "pipelined_loading",
        "E first, KV meanwhile",
        "32",
        "firsttoken_studies.droidspeak.pipelined_loading:pipelined_loading",
        "loading_summary",
    ),
    Experiment(
        "prefill_latency",
        "How long each method computes",
        "33",
        "firsttoken_studies.droidspeak.prefill_latency:prefill_latency",
        "latency_summary",
    ),
    Experiment(
        "reuse_methods",
        "What each method answers",
        "33",
        "firsttoken_studies.droidspeak.reuse_methods:reuse_methods",
        "firsttoken_studies.droidspeak.reuse_methods:methods_summary",
    ),
    Experiment(
        "profile_transfer",
        "A profile on another task",
        "34",
        "firsttoken_studies.droidspeak.profile_transfer:profile_transfer",
        "transfer_summary",
    ),
    Experiment(
        "adaptive_group",
        "A group for this link",
        "35",
        "firsttoken_studies.droidspeak.adaptive_group:adaptive_group",
        "adaptive_summary",
    ),
    Experiment(
        "quality_gate",
        "A gate before the answer",
        "35",
        "firsttoken_studies.droidspeak.gating:quality_gate",
        "gate_summary",
    ),
    Experiment(
        "reuse_throughput",
        "What a shorter prefill is worth under load",
        "36",
        "firsttoken_studies.engine.reuse_throughput:reuse_throughput",
        "reuse_throughput_summary",
        reads=("prefill_latency",),
    ),
    Experiment(
        "generation_stalls",
        "Running requests while a long prompt arrives",
        "40",
        "firsttoken_studies.sarathi.generation_stalls:generation_stalls",
        "stalls_summary",
    ),
    Experiment(
        "under_chunks",
        "A long prompt under running streams",
        "40",
        "firsttoken_studies.combined.long_prompt_interference:under_chunks",
        "under_chunks_summary",
    ),
    Experiment(
        "serving_capacity",
        "How many requests a second within an objective",
        "41",
        "firsttoken_studies.sarathi.serving_capacity:serving_capacity",
        "capacity_summary",
    ),
    Experiment(
        "pipeline_bubbles",
        "What chunks leave idle on a pipeline",
        "41",
        "firsttoken_studies.sarathi.pipeline_bubbles:pipeline_bubbles",
        "pipeline_summary",
    ),
    Experiment(
        "simulator_error",
        "The simulator against a real GPU",
        "42",
        "firsttoken_studies.sarathi.simulator_error:simulator_error",
        "error_summary",
        LONG,
    ),
    Experiment(
        "batch_cost", "What a batch costs", "43", "firsttoken_studies.sarathi.batch_cost:batch_cost", "batch_summary"
    ),
    Experiment(
        "changing_load",
        "Schedulers under a load that changes",
        "44",
        "firsttoken_studies.sarathi.changing_load:changing_load",
        "changing_summary",
    ),
    Experiment(
        "live_peer",
        "A live peer, asked the same",
        "45",
        "firsttoken_studies.sarathi.live_peer:live_peer",
        "peer_summary",
        LONG,
    ),
    Experiment(
        "swarm_survival",
        "Servers killed, stopped and cut off",
        "50",
        "firsttoken_studies.petals.swarm_survival:swarm_survival",
        "survival_summary",
        _ON_A_CPU,
        in_turns=True,
    ),
    Experiment(
        "swarm_transport",
        "What the way through servers takes",
        "50",
        "firsttoken_studies.petals.swarm_survival:swarm_transport",
        "transport_summary",
        _ON_A_CPU,
        in_turns=True,
    ),
    Experiment(
        "eight_bits",
        "Weights and hidden states in 8 bits",
        "51",
        "firsttoken_studies.petals.eight_bits:eight_bits",
        "eight_bits_summary",
    ),
    Experiment(
        "swarm_chains",
        "A chain of servers beside offloading",
        "52",
        "firsttoken_studies.petals.swarm_chains:swarm_chains",
        "chains_summary",
    ),
    Experiment(
        "swarm_churn",
        "A swarm whose servers come and go",
        "52",
        "firsttoken_studies.petals.swarm_churn:swarm_churn",
        "churn_summary",
    ),
    Experiment(
        "swarm_tuning",
        "Training through frozen servers",
        "53",
        "firsttoken_studies.petals.swarm_tuning:swarm_tuning",
        "tuning_summary",
        in_turns=True,
    ),
    Experiment(
        "swarm_validation",
        "Servers that lie, and clients that look",
        "54",
        "firsttoken_studies.petals.swarm_validation:swarm_validation",
        "validation_summary",
        _ON_A_CPU,
    ),
    Experiment(
        "swarm_privacy",
        "Tokens read from hidden states",
        "54",
        "firsttoken_studies.petals.swarm_privacy:swarm_privacy",
        "privacy_summary",
    ),
    Experiment(
        "borrowed_start",
        "A start that borrows from a warm neighbour",
        "56",
        "firsttoken_studies.combined.borrowed.experiment:borrowed_start",
        "firsttoken_studies.combined.borrowed.experiment:borrowed_start_summary",
    ),
    Experiment(
        "parallel_start",
        "A start of several processes that each fetch a part",
        "56",
        "firsttoken_studies.combined.fetchers.experiment:parallel_start",
        "firsttoken_studies.combined.fetchers.experiment:parallel_start_summary",
    ),
    Experiment(
        "one_engine",
        "Stages, stored prefixes and shared prompts on one engine",
        "60",
        "firsttoken_studies.combined.one_engine:one_engine",
        "one_engine_summary",
    ),
)
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}


def find_experiment(name: str) -> Experiment:
    """The experiment ``name``. Raises ProfileError when there is none."""
    if name not in EXPERIMENTS:
        raise ProfileError(f"no experiment {name!r}; {unknown(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
