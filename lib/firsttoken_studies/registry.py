"""The experiments there are: each room registers its own (``registered.py``), in the order of the notebooks here.

An experiment is a function ``(profile) -> Outcome`` somewhere in a system, with a pure function beside it that makes
the summary of its rows; naming both as text keeps the systems apart and the start quick.
"""

from __future__ import annotations

from firsttoken.study.errors import ProfileError
from firsttoken.study.experiment import Experiment
from firsttoken.study.foreign.schema import unknown
from firsttoken_studies.combined.registered import EXPERIMENTS as TOGETHER
from firsttoken_studies.cps.registered import EXPERIMENTS as CROSSPOINT
from firsttoken_studies.droidspeak.registered import EXPERIMENTS as KVREUSE
from firsttoken_studies.engine.registered import EXPERIMENTS as ENGINE
from firsttoken_studies.petals.registered import EXPERIMENTS as SWARM
from firsttoken_studies.progressiveserve.registered import EXPERIMENTS as PROGRESSIVE
from firsttoken_studies.sarathi.registered import EXPERIMENTS as CHUNKED

MACHINE = Experiment(
    "machine", "What this machine reaches", "00", "firsttoken.study.ceilings:experiment", "ceilings_summary"
)
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in sorted(
        (MACHINE, *PROGRESSIVE, *CROSSPOINT, *ENGINE, *KVREUSE, *CHUNKED, *SWARM, *TOGETHER),
        key=lambda experiment: experiment.notebook,
    )
}


def find_experiment(name: str) -> Experiment:
    """The experiment ``name``. Raises ProfileError when there is none."""
    if name not in EXPERIMENTS:
        raise ProfileError(f"no experiment {name!r}; {unknown(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
