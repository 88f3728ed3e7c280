"""The experiments there are: each room registers its own (``registered.py``), in the order of the notebooks here.

An experiment is a function ``(profile) -> Outcome`` somewhere in a system, with a pure function beside it that makes
the summary of its rows; naming both as text keeps the systems apart and the start quick.
"""

from __future__ import annotations

from firsttoken.chunked.registered import EXPERIMENTS as CHUNKED
from firsttoken.crosspoint.registered import EXPERIMENTS as CROSSPOINT
from firsttoken.engine.registered import EXPERIMENTS as ENGINE
from firsttoken.kvreuse.registered import EXPERIMENTS as KVREUSE
from firsttoken.progressive.registered import EXPERIMENTS as PROGRESSIVE
from firsttoken.study.errors import ProfileError
from firsttoken.study.experiment import Experiment
from firsttoken.study.foreign.schema import unknown
from firsttoken.swarm.registered import EXPERIMENTS as SWARM
from firsttoken.together.registered import EXPERIMENTS as TOGETHER

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
