"""What an experiment is to those who run one: where its functions are, by name, and who reads its result."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line names experiments without what they compute with
    from firsttoken.study.profile import Profile
    from firsttoken.study.summary import Summary
    from firsttoken_studies.record.results import Outcome, Result, Rows

EVERY_PROFILE = ("quick", "review", "full", "gpu", "paper")
LONG = ("full", "gpu", "paper", "tasks")  # training runs: half an hour and more on a CPU


@dataclass(frozen=True)
class Experiment:
    """``target`` is "module:function"; ``notebook`` the number of the notebook that shows the result.

    ``summary`` names the function, in the same module unless it says which, that makes the summary of rows and
    parameters, and of nothing else: so anybody can make it again (``tests/study/test_recorded.py`` does). ``reads`` are
    experiments of other systems whose results this one is handed: no system imports another. In those ``in_turns``
    several processes of this machine compute one after the other, as they do where users start them: their idle threads
    sleep soon (``study/system/openmp.py``).
    """

    name: str
    title: str
    notebook: str
    target: str
    summary: str
    profiles: tuple[str, ...] = EVERY_PROFILE
    reads: tuple[str, ...] = ()
    in_turns: bool = False

    def __call__(self, profile: Profile, *read: Result, **mechanisms: Any) -> Outcome:
        return self.function(profile, *read, **mechanisms)

    @property
    def function(self) -> Callable[..., Outcome]:
        """The function of the study. What it takes by keyword only are mechanisms, a reader's in place of its own."""
        return _named(self.target)

    def summarise(self, rows: Rows, parameters: Mapping[str, Any]) -> Summary:
        """The summary of ``rows`` that were measured with ``parameters`` (``Result.parameters``)."""
        return _named(self.summary if ":" in self.summary else f"{self.module}:{self.summary}")(rows, parameters)

    @property
    def module(self) -> str:
        """The module of its function, whose imports are the code that a result hangs on (``study/code.py``)."""
        return self.target.partition(":")[0]


def _named(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)
