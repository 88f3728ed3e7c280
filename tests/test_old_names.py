"""Modules are found by the names that they had before, and one line says what they are called now."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from firsttoken.old_names import RENAMED, OldMember, renamed


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_leads_to_a_module_that_is_there(name: str) -> None:
    if not name.startswith("firsttoken.crosspoint.on_vllm"):  # which needs vLLM
        assert importlib.import_module(name) is importlib.import_module(renamed(name))


def test_a_class_is_the_same_by_both_names_and_the_new_one_is_told_once() -> None:
    code = (
        "from firsttoken.progressiveserve.staged_serving.transitions import Transition\n"
        "from firsttoken.progressive.recovery.transitions import Transition as Old\n"
        "import firsttoken.progressive.recovery.transitions, firsttoken.progressiveserve as now\n"
        "assert Old is Transition and now.__spec__.name == now.__name__ == 'firsttoken.progressiveserve'"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    old, new = "firsttoken.progressive.recovery.transitions", "firsttoken.progressiveserve.staged_serving.transitions"
    assert f"firsttoken: the module {old} is called {new} now" in ran.stderr.splitlines()
    assert len(ran.stderr.splitlines()) == 3  # of the module, and of the two folders on the way to it


def test_names_of_today_are_left_alone() -> None:
    for name in ("firsttoken.engine", "firsttoken.engine.engine", "firsttoken.progressiveserve.stages", "torch"):
        assert renamed(name) is None
    with pytest.raises(ModuleNotFoundError, match=r"firsttoken\.petals\.nothing"):
        importlib.import_module("firsttoken.swarm.nothing")


def test_a_member_is_found_by_its_old_name_and_the_new_one_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Policy:
        work = OldMember("chunk")

        def __init__(self) -> None:
            self.chunk = 3

    class Own(Policy):
        pass

    assert (Own().work, Own().work) == (3, 3)
    assert capsys.readouterr().err == "firsttoken: Policy.work is called Policy.chunk now\n"


@pytest.mark.parametrize(
    ("module", "old", "now"),
    [
        ("firsttoken.engine.model_version", "View", "ModelVersion"),
        ("firsttoken.engine.hidden_state_cache", "Edges", "HiddenStateCache"),
        ("firsttoken.engine.schedulers.scheduler", "Bounds", "SchedulerConfig"),
        ("firsttoken.engine.async_engine", "Server", "AsyncEngine"),
        ("firsttoken.petals.timeouts", "Patience", "Timeouts"),
        ("firsttoken_extras.worker.remote_executor", "ApartExecutor", "RemoteExecutor"),
        ("firsttoken_extras.layer_borrowing.lease", "Loan", "Lease"),
    ],
)
def test_a_class_is_found_by_the_name_that_it_had(module, old, now, capsys) -> None:
    found = importlib.import_module(module)
    assert getattr(found, old) is getattr(found, now)
    assert capsys.readouterr().err == f"firsttoken: {module}.{old} is called {module}.{now} now\n"
    with pytest.raises(AttributeError, match="has no attribute 'Nosuch'"):
        _ = found.Nosuch
