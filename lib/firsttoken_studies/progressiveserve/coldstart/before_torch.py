"""A first token before torch is imported, against the same start with torch first, of a plain folder. Both are tried
as a process of their own, as `firsttoken serve`, asked over HTTP, and as copies of a fork server; `serve` also with
the model in stages. Where CRIU can, a process that has its model is restored, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firsttoken.assets.needs import ModelFacts, check
from firsttoken.assets.tokenizer_files import TOKENIZER
from firsttoken.progressiveserve.base_model import ServedConfig
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.kernel_forkserver import possible
from firsttoken.study.overlay import over
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Table, rows_where
from firsttoken.study.show import interval
from firsttoken_studies.progressiveserve.coldstart.checkpoints import served_checkpoint
from firsttoken_studies.progressiveserve.coldstart.experiments import trial_specs
from firsttoken_studies.progressiveserve.coldstart.harness import NONE, TrialLink, one_trial, run_trials
from firsttoken_studies.progressiveserve.coldstart.prepared import no_snapshots
from firsttoken_studies.progressiveserve.coldstart.spec import TrialSpec
from firsttoken_studies.progressiveserve.coldstart.summary import cold_start_summary as summary  # noqa: F401
from firsttoken_studies.progressiveserve.coldstart.summary import link_floor
from firsttoken_studies.progressiveserve.coldstart.variants import find_variant

STARTS = ("torch_behind", "lean_folder")
SERVED = ("served_behind", "served_first", "served_stages_behind", "served_stages_first")
COPIED = ("copied_first", "copied_behind")
RESTORED = "restored"
LINK = {"link": "unshaped"}
WIRE = TrialLink(0.0, NONE)
LANES: tuple[tuple[str, str, Sequence[str]], ...] = (
    ("1 runtime delivery", "not measured: the environment is installed", ()),
    ("2 model delivery", "from this disk, read alone", ("read",)),
    ("3 ordinary boot", "from the creation of the process", (*STARTS, *SERVED)),
    ("4 initialized-engine reuse", "from the request for a copy that has the imports", COPIED),
    ("4 initialized-engine reuse", "from the call of `criu restore`", (RESTORED,)),
    ("5 resident lifecycle", "not measured: a service here keeps its model awake", ()),
    ("6 live reconfiguration", "not measured: a start changes no running service", ()),
)
"""The lanes of vLLM's roadmap (github.com/vllm-project/vllm/issues/48193), each with what its clock counts from here,
and the starts in it."""
PHASES = {
    "framework bootstrap": ("phase_interpreter_s", "phase_imports_s", "phase_restore_s"),
    "tokenizer": ("phase_config_and_tokenizer_s",),
    "weights": ("load_s",),
    "first forward pass": ("phase_prefill_s",),
    "all": ("ttft_process_s",),
}
"""The phases of a trial, as those who measure vLLM call them."""


@dataclass(frozen=True)
class BeforeTorchConfig:
    """All starts run ``rounds`` times from this machine's own storage, in random order; the prompt is the first of
    ``questions``, and ``readers`` threads read the files alone to say how long their bytes take."""

    questions: str
    rounds: int
    readers: int

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ProfileError("before_torch: rounds must be at least 1")


def starts(profile: Profile) -> Outcome:
    """Rows of fresh processes whose files are not in the page cache, from their creation to the first token; a model
    without a tokenizer is not served."""
    config = profile.section("before_torch", BeforeTorchConfig)
    check(profile.section("served", ServedConfig).needs(), ModelFacts(profile.model))
    checkpoint = served_checkpoint(profile)
    specs = trial_specs(profile, checkpoint, config.questions, config.readers)
    served = SERVED if (checkpoint.stock / TOKENIZER).is_file() else ()
    left_out = {} if possible() else dict.fromkeys(COPIED, "processes are copied on Linux alone, and beside no GPU")
    if reason := _not_restored(specs(RESTORED)):
        left_out[RESTORED] = reason
    prepared = [name for name in (*COPIED, RESTORED) if name not in left_out]
    trials = [[specs(name) for name in ("read", *STARTS, *served, *prepared)]] * config.rounds
    rows = run_trials(trials, WIRE, profile.seed)
    return Outcome(rows, {"disk": link_floor(rows)}, provenance=checkpoint.provenance | {"left_out": left_out})


def _not_restored(spec: TrialSpec) -> str:
    """Why CRIU can't restore a process here, in one line; "" where it has just done so."""
    if reason := no_snapshots():
        return reason
    try:
        one_trial(spec, WIRE)
    except FirstTokenError as error:
        return str(error)
    return ""


def start_rows(recorded: Result | None, now: Result) -> Table:
    """A line a start: seconds from the creation of the process to the first token, what comes behind it, and what is
    paid before it: seconds, and MB that a parent holds in memory or an image on the disk; or why it was not tried."""
    for drawn in over(recorded, now):
        found = drawn.result.summary
        for name in (*STARTS, *SERVED, *COPIED, RESTORED):
            seconds = {"the first token, s": found.get("process_ttft_p50_s", variant=name, **LINK)}
            if seconds["the first token, s"] is None:  # a result of before it was tried, or it cannot be tried there
                if reason := drawn.result.provenance.get("left_out", {}).get(name):
                    yield {"start": find_variant(name).label, "not tried": reason, "whose": drawn.who()}
                continue
            seconds["the longest gap behind it, s"] = found.get("longest_gap_s", variant=name, **LINK)
            seconds["the step in which the engine takes over, s"] = found.get("takeover_s", variant=name, **LINK)
            seconds["paid before, s"] = found.get("paid_s", variant=name, **LINK)
            seconds["kept, MB"] = found.get("kept_mb", variant=name, **LINK)
            row = {"start": find_variant(name).label} | {what: interval(entry, 2) for what, entry in seconds.items()}
            yield row | {"whose": drawn.who()}


def lane_rows(result: Result) -> Table:
    """A line a start under the lanes of vLLM's roadmap: what its clock counts from, and the median seconds of its
    phases and to its end, the first token (read alone: the last byte); a line alone for a lane without any."""
    for lane, clock, names in LANES:
        tried = [name for name in names if rows_where(result.rows, variant=name)]
        for name in tried:
            phases = {f"{what}, s": _median(result, name, columns) for what, columns in PHASES.items()}
            yield {"lane": lane, "start": find_variant(name).label, "clock": clock} | phases
        if not tried:
            yield {"lane": lane, "clock": clock}


def _median(result: Result, name: str, columns: Sequence[str]) -> str:
    """The median over the trials of ``name`` of the sum of those of ``columns`` that it has; "" where it has none."""
    rows = rows_where(result.rows, variant=name)
    there = [column for column in columns if column in rows[0]]
    return f"{np.median([sum(row[column] for column in there) for row in rows]):.2f}" if there else ""
