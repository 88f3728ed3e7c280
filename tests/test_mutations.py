"""A mechanism that is replaced by a plausible wrong one turns its notebook red, with a message that names it.

The quick mutations are part of the unit tests; ``tests/run.sh --mutations`` tries them all.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from functools import reduce

import pytest
from mutants.running import Mutation, error_of, mutations

from firsttoken_studies.record import kernel_forkserver

CHOSEN = [one for one in mutations() if one.quick or os.environ.get("FIRSTTOKEN_MUTATIONS")]


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """Torch and the plotting libraries are imported once, by a process of which those with the cells are copies."""
    with kernel_forkserver.warmed():
        yield


@pytest.mark.assets
@pytest.mark.parametrize("mutation", CHOSEN, ids=lambda one: f"{one.notebook} {one.name}")
def test_a_wrong_mechanism_turns_its_notebook_red(mutation: Mutation) -> None:
    said = error_of(mutation.notebook, mutation.name)
    assert said.startswith("MechanismError: ") and re.search(mutation.says, said), said


@pytest.mark.parametrize(
    "target", sorted({mutation.patch.args[0] for mutation in mutations() if mutation.rewrite is None})
)
def test_what_is_made_wrong_is_there(target: str) -> None:
    module, _, names = target.partition(":")
    assert reduce(getattr, names.split("."), importlib.import_module(module)) is not None


@pytest.mark.assets
@pytest.mark.parametrize("notebook", sorted({one.notebook for one in CHOSEN}))
def test_the_notebooks_are_green_as_they_are(notebook: str) -> None:
    assert error_of(notebook) == ""
