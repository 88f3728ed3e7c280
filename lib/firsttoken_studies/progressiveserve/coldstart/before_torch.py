"""A first token before torch is imported, against the same start with torch first, of a plain folder. Both are tried
as a process of their own and as `firsttoken serve`, asked over HTTP; `serve` also with the model in stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.assets.needs import ModelFacts, check
from firsttoken.assets.tokenizer_files import TOKENIZER
from firsttoken.progressiveserve.base_model import ServedConfig
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken_studies.nb13_cold_start.study import trial_specs
from firsttoken_studies.progressiveserve.coldstart.checkpoints import served_checkpoint
from firsttoken_studies.progressiveserve.coldstart.harness import NONE, TrialLink, run_trials
from firsttoken_studies.progressiveserve.coldstart.summary import cold_start_summary as summary  # noqa: F401
from firsttoken_studies.progressiveserve.coldstart.summary import link_floor
from firsttoken_studies.progressiveserve.coldstart.variants import find_variant
from firsttoken_studies.record.overlay import over
from firsttoken_studies.record.results import Outcome, Result, Table
from firsttoken_studies.record.show import interval

STARTS = ("torch_behind", "lean_folder")
SERVED = ("served_behind", "served_first", "served_stages_behind", "served_stages_first")
LINK = {"link": "unshaped"}


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
    trials = [[specs(name) for name in ("read", *STARTS, *served)]] * config.rounds
    rows = run_trials(trials, TrialLink(0.0, NONE), profile.seed)
    return Outcome(rows, {"disk": link_floor(rows)}, provenance=checkpoint.provenance)


def start_rows(recorded: Result | None, now: Result) -> Table:
    """A line a start: seconds from the creation of the process to the first token, and what comes behind it."""
    for shown in over(recorded, now):
        measured = shown.result.summary
        for name in (*STARTS, *SERVED):
            seconds = {"the first token, s": measured.get("process_ttft_p50_s", variant=name, **LINK)}
            if seconds["the first token, s"] is None:  # a result of before it was tried, or it cannot be tried there
                continue
            seconds["the longest gap behind it, s"] = measured.get("longest_gap_s", variant=name, **LINK)
            seconds["the step in which the engine takes over, s"] = measured.get("takeover_s", variant=name, **LINK)
            row = {"start": find_variant(name).label} | {label: interval(entry, 2) for label, entry in seconds.items()}
            yield row | {"whose": shown.who()}
