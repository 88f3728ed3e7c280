"""The experiments there are, in the order of their notebooks.

An experiment is a function ``(profile) -> Outcome`` of a study, with a pure function beside it that makes the summary
of its rows. Both are named as text, so that the list is read without importing any study.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken_studies.record.experiment import LONG, Experiment

_FOLDERS = {path.name[2:4]: path.name for path in Path(__file__).parent.glob("nb[0-9][0-9]_*")}
_ON_A_CPU = ("quick", "review", "full")
_OWN_ADAPTERS = ("quick", "review", "full", "gpu")  # the profiles of a model that this project has fine-tunes of


def _study(name: str, title: str, notebook: str, module: str, summary: str, *others: Any, **named: Any) -> Experiment:
    """An experiment of this package: the function of its own name in ``module``, or another, "module:function". A
    module whose name begins with a point is of the notebook's folder.

    ``summary`` is a function of that module, or "module:function", too.
    """
    target = module if ":" in module else f"{module}:{name}"
    target = f"{_FOLDERS[notebook]}{target}" if target.startswith(".") else target
    made_by = f"firsttoken_studies.{summary}" if ":" in summary else summary
    return Experiment(name, title, notebook, f"firsttoken_studies.{target}", made_by, *others, **named)


_ALL = (
    _study("machine", "What this machine reaches", "00", ".study:experiment", "ceilings_summary"),
    _study("sizes", "What a block and its adapters weigh", "11", ".sizes", "sizes_summary"),
    _study("layer_distance", "Which layers change least", "11", "progressiveserve.layers", "distance_summary"),
    _study("families", "Three families of models", "11", ".families", "families_summary", _ON_A_CPU),
    _study("families_trained", "Families of models, healed and sharing a cache", "11",
           ".families_trained", "families_trained_summary", _ON_A_CPU),
    _study("stage_quality", "What each stage answers", "12", "progressiveserve.layers", "stage_summary"),
    _study("stage_tasks", "What each stage answers on a second task", "12",
           ".stage_tasks", "stage_tasks_summary"),
    _study("healing_training", "The adapters that are served", "12",
           "progressiveserve.layers", "training_summary", LONG),
    _study("healing_live", "Healing a pruned model", "12", "progressiveserve.layers", "live_summary"),
    _study("healing_controls", "What healing owes to what", "12",
           ".ablations", "controls_summary", LONG),
    _study("cold_start", "From a cold disk to the first token", "13",
           ".study", "progressiveserve.coldstart.summary:cold_start_summary"),
    _study("cold_start_shapes", "The same with larger shapes", "13",
           ".study", "progressiveserve.coldstart.summary:shapes_summary", LONG),
    _study("deferral_sweep", "How many layers may wait", "14",
           ".study", "deferral_summary"),
    _study("recovery_timeline", "Serving while it grows", "15", ".study", "timeline_summary"),
    _study("open_session", "A session that is open meanwhile", "16",
           ".study", "session_summary"),
    _study("precision_frontier", "Which bits may wait", "17", ".frontier", "precision_summary"),
    _study("precision_start", "The first token from the first bits", "17",
           ".bitplane_starts", "precision_start_summary"),
    _study("environment", "What the engine runs on", "20", ".environment", "environment_summary"),
    _study("throughput", "The engine beside others", "20", ".throughput", "throughput_summary"),
    _study("recovery_latency", "Swap or recompute", "21", ".study", "recovery_latency_summary"),
    _study("crosspoint_replayed", "The cross-point policy on the paper's costs", "22",
           ".study", "replayed_summary"),
    _study("crosspoint_live", "The policies live, and the simulator's error", "22",
           ".study", "live_summary"),
    _study("victims", "Who is preempted, beside how", "24", ".study", "victims_summary"),
    _study("victims_live", "Who is preempted, live", "24", ".study", "victims_summary"),
    _study("online_crosspoint", "A learnt threshold", "23", ".study", "online_summary"),
    _study("layer_profile", "Which layers to recompute", "30", ".profiling", "profile_summary"),
    _study("reuse_training", "Models to share between", "30", ".training", "training_summary", LONG),
    _study("transitions", "Why one contiguous group", "31", ".study", "transitions_summary"),
    _study("pipelined_loading", "E first, KV meanwhile", "32", ".study", "loading_summary"),
    _study("prefill_latency", "How long each method computes", "33", ".prefill_latency", "latency_summary"),
    _study("reuse_methods", "What each method answers", "33", ".reuse_methods", "methods_summary"),
    _study("profile_transfer", "A profile on another task", "34", ".study", "transfer_summary"),
    _study("adaptive_group", "A group for this link", "35", ".adaptive_group", "adaptive_summary"),
    _study("quality_gate", "A gate before the answer", "35", ".gating", "gate_summary"),
    _study("reuse_throughput", "What a shorter prefill is worth under load", "36",
           ".study", "reuse_throughput_summary", reads=("prefill_latency",)),
    _study("generation_stalls", "Running requests while a long prompt arrives", "40",
           ".study", "stalls_summary"),
    _study("serving_capacity", "How many requests a second within an objective", "41",
           ".bench", "capacity_summary"),
    _study("pipeline_bubbles", "What chunks leave idle on a pipeline", "41",
           ".pipeline_bubbles", "pipeline_summary"),
    _study("simulator_error", "The simulator against a real GPU", "42",
           ".simulator_error", "error_summary", LONG),
    _study("second_card", "The simulator against a second GPU", "42",
           ".simulator_error", "second_card_summary", LONG),
    _study("two_cards", "The simulator and two GPUs", "42",
           ".simulator_error", "two_cards_summary", LONG),
    _study("chunk_error", "A chunk behind a prefix", "42", ".chunk_error", "chunk_summary", LONG),
    _study("operators_here", "Published operators beside a card at hand", "42",
           ".operators_here", "operators_here_summary", ("gpu",)),
    _study("batch_cost", "What a batch costs", "43", ".study", "batch_summary"),
    _study("live_peer", "A live peer, asked the same", "45", ".study", "peer_summary", LONG),
    _study("operator_error", "Measured operators against servers", "46", ".operator_error", "operator_summary"),
    _study("host_time", "The host's time, fitted once", "46", ".host_time", "host_summary"),
    _study("mixture_error", "Mixtures against servers", "46", ".operator_error", "operator_summary"),
    _study("card_capacity", "Capacity on GPUs that are not here", "46", ".card_capacity", "card_summary"),
    _study("objective_sweep", "Capacity by the bound between tokens", "46", ".paper_cards", "sweep_summary"),
    _study("fixed_load", "The two halves of stall-free batching at one load", "46",
           ".paper_cards", "load_summary"),
    _study("reports_on_cards", "The other reports on GPUs that are not here", "47",
           ".study", "on_cards_summary"),
    _study("swarm_survival", "Servers killed, stopped and cut off", "50",
           ".study", "survival_summary", _ON_A_CPU, in_turns=True),
    _study("swarm_transport", "What the way through servers takes", "50",
           ".study", "transport_summary", _ON_A_CPU, in_turns=True),
    _study("eight_bits", "Weights and hidden states in 8 bits", "51", ".eight_bits", "eight_bits_summary"),
    _study("eight_bits_tasks", "Accuracy with weights in 8 bits", "51", ".eight_bits_tasks", "tasks_summary"),
    _study("swarm_chains", "A chain of servers beside offloading", "52", ".swarm_chains", "chains_summary"),
    _study("swarm_churn", "A swarm whose servers come and go", "52", ".swarm_churn", "churn_summary"),
    _study("swarm_tuning", "Training through frozen servers", "53",
           ".study", "tuning_summary", in_turns=True),
    _study("swarm_validation", "Servers that lie, and clients that look", "54",
           ".swarm_validation", "validation_summary", _ON_A_CPU),
    _study("swarm_privacy", "Tokens read from hidden states", "54", ".swarm_privacy", "privacy_summary"),
    _study("borrowed_start", "A start that borrows from a warm neighbour", "56",
           ".borrowed_start", "borrowed_start_summary"),
    _study("parallel_start", "A start of several processes that each fetch a part", "56",
           ".parallel_start", "parallel_start_summary"),
    _study("agents", "Agents in turns", "62", ".study", "agents_summary", _OWN_ADAPTERS),
    _study("one_engine", "Stages, stored prefixes and shared prompts on one engine", "60",
           ".study", "one_engine_summary"),
    _study("five_at_once", "All five reports in one replica that starts cold under load", "61",
           ".study", "five_summary"),
    _study("five_at_once_simulated", "The same simulated, here and on a GPU that is not here", "61",
           ".simulated", "simulated_summary", reads=("five_at_once",)),
    _study("many_starts", "Many cold starts over one link", "63", ".study", "starts_summary"),
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}


def find_experiment(name: str) -> Experiment:
    """The experiment ``name``. Raises ProfileError when there is none."""
    if name not in EXPERIMENTS:
        raise ProfileError(f"no experiment {name!r}; {unknown(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
