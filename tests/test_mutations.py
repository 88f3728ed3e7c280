"""A mechanism that is replaced by a plausible wrong one turns its notebook red, with a message that names it.

The quick mutations are part of the unit tests; ``tests/run.sh --mutations`` tries them all.
"""

from __future__ import annotations

import importlib
import os
import re

import pytest
from mutants.running import Mutation, error_of

REPORTS = ("sarathi", "cps", "progressiveserve", "droidspeak", "petals")
ALL = "FIRSTTOKEN_MUTATIONS"


def mutations() -> list[Mutation]:
    found = [one for report in REPORTS for one in importlib.import_module(f"mutants.{report}").MUTATIONS]
    return found if os.environ.get(ALL) else [one for one in found if one.quick]


@pytest.mark.assets
@pytest.mark.parametrize("mutation", mutations(), ids=lambda one: f"{one.notebook} {one.name}")
def test_a_wrong_mechanism_turns_its_notebook_red(mutation: Mutation) -> None:
    said = error_of(mutation.notebook, mutation.patch)
    assert said.startswith("MechanismError: ") and re.search(mutation.says, said), said


@pytest.mark.assets
@pytest.mark.parametrize("notebook", sorted({one.notebook for one in mutations()}))
def test_the_notebooks_are_green_as_they_are(notebook: str) -> None:
    assert error_of(notebook) == ""
