"""The experiments of this room. Where layers or bits wait, and what that costs and gains."""

from __future__ import annotations

from firsttoken.study.experiment import LONG, Experiment

_PROGRESSIVE = "firsttoken_studies.progressiveserve.layers"
_COLDSTART = "firsttoken_studies.progressiveserve.coldstart"
_RECOVERY = "firsttoken_studies.progressiveserve"

EXPERIMENTS = (
    Experiment(
        "sizes",
        "What a block and its adapters weigh",
        "11",
        "firsttoken_studies.progressiveserve.sizes:sizes",
        "sizes_summary",
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
        "firsttoken_studies.progressiveserve.controls:healing_controls",
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
        "firsttoken_studies.progressiveserve.frontier:precision_frontier",
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
)
