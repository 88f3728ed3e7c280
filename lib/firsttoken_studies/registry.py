"""The experiments there are, in the order of their notebooks: the rows of ``experiments.toml``.

An experiment is a function ``(profile) -> Outcome`` of a study, with a pure function beside it that makes the summary
of its rows. Both are named as text, so that the table is read without importing any study.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken_studies.record.experiment import Experiment

_HERE = Path(__file__).parent
_FOLDERS = {path.name[2:4]: path.name for path in _HERE.glob("nb[0-9][0-9]_*")}


def _experiment(name: str, notebook: str, target: str, summary: str, **row: Any) -> Experiment:
    """The experiment of a row. A module whose name begins with a point is of the notebook's folder; the function is
    the one of the experiment's name where the row names none."""
    module = f"{_FOLDERS[notebook]}{target}" if target.startswith(".") else target
    function = module if ":" in module else f"{module}:{name}"
    made_by = f"{__package__}.{summary}" if ":" in summary else summary
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Experiment(name, notebook=notebook, target=f"{__package__}.{function}", summary=made_by, **values)


_ROWS = tomllib.loads((_HERE / "experiments.toml").read_text(encoding="utf-8"))
EXPERIMENTS: dict[str, Experiment] = {name: _experiment(name, **row) for name, row in _ROWS.items()}


def find_experiment(name: str) -> Experiment:
    """The experiment ``name``. Raises ProfileError when there is none."""
    if name not in EXPERIMENTS:
        raise ProfileError(f"no experiment {name!r}; {unknown(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
