"""Threads of OpenMP given back, and loops that need none; seen in the threads that the system has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_models import small_model

from firsttoken.engine.async_engine import AsyncEngine
from firsttoken.study.system.compiled import ACCELERATOR, compiler
from firsttoken.study.system.openmp import give_back_threads, loops_elsewhere, loops_on_one_core, wait_policy
from firsttoken.study.system.processor import cpuinfo
from firsttoken_studies.record import kernel_forkserver

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not TASKS.is_dir(), reason="the system does not list threads")


def tasks() -> set[str]:
    return {task.name for task in TASKS.iterdir()}


def new(before: set[str], expected: int) -> int:
    """How many there are besides ``before``, ``expected`` within 5 s or not: one that has ended is listed a while."""
    deadline = time.monotonic() + 5
    while (there := len(tasks() - before)) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return there


def kept_after(last: Callable[[], object], again: int) -> tuple[int, ...]:
    """Threads beside one whose loops keep two: after a loop, after ``last``, and after a loop that keeps ``again``."""
    found = []

    def work() -> None:
        torch.set_num_threads(3)
        alone = tasks()
        torch.ones(1 << 20).mul_(2)
        found.append(new(alone, 2))
        last()
        found.append(new(alone, 0))
        torch.ones(1 << 20).mul_(2)
        found.append(new(alone, again))

    before = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    return tuple(found)


def test_threads_are_given_back_and_come_again():
    assert kept_after(give_back_threads, again=2) == (2, 0, 2)


def test_loops_on_one_core_need_no_others():
    assert kept_after(loops_on_one_core, again=0) == (2, 0, 0)


def run_with_three(work: Callable[[], None]) -> None:
    """In a thread that has run no loop, where every thread is told to use three."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)


def test_a_thread_that_has_run_none_yet_runs_its_first_on_one_core():
    kept = []

    def work() -> None:
        loops_on_one_core()
        alone = tasks()
        torch.ones(1 << 20).mul_(2)
        kept.append(new(alone, 0))

    run_with_three(work)
    assert kept == [0]


def test_loops_elsewhere_keep_none_and_come_back_afterwards():
    found = []

    def work() -> None:
        alone = tasks()
        with loops_elsewhere():
            torch.ones(1 << 20).mul_(2)
            found.append(new(alone, 0))
        torch.ones(1 << 20).mul_(2)
        found.append(new(alone, 2))

    run_with_three(work)
    assert found == [0, 2]


def test_twice_and_where_nothing_is_kept():
    assert kept_after(lambda: (give_back_threads(), give_back_threads()), again=2) == (2, 0, 2)


def test_who_makes_a_server_leaves_the_loops_to_it():
    """The engine has nothing to do here: it is its thread that needs the others' out of the way."""
    assert kept_after(
        lambda: AsyncEngine(SimpleNamespace(busy=False, executor=SimpleNamespace(version=None))).close(), again=2
    ) == (2, 0, 2)


def test_an_event_loop_in_a_copy_does_not_wait_for_threads_that_were_not_copied():
    torch.set_num_threads(3)
    try:
        torch.ones(1 << 20).mul_(2)  # this thread keeps two now
        if not (child := os.fork()):
            signal.alarm(10)
            with loops_elsewhere():
                torch.ones(1 << 20).mul_(2)
            os._exit(0)
    finally:
        torch.set_num_threads(1)
        give_back_threads()
    assert os.waitpid(child, 0)[1] == 0


SERVED = """
import os, sys
from contextlib import contextmanager
from firsttoken_serve.http import launch

@contextmanager
def running(config, broken):
    print(os.environ["GOMP_SPINCOUNT"], "torch" in sys.modules)
    broken(None)
    yield "nowhere"

launch.running = running
from firsttoken.__main__ import main
sys.exit(main(["serve", sys.argv[1]]))
"""
OPENED = """
import os, sys, types
sys.modules["ipykernel.zmqshell"] = types.ModuleType("zmqshell")
import firsttoken
print(os.environ["GOMP_SPINCOUNT"], "torch" in sys.modules)
"""


def said(code: str, *arguments: object, **environment: str) -> str:
    """The first line of a process in which nothing else says how threads wait."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("GOMP_", "OMP_WAIT", "CXX"))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.stdout.splitlines()[0]


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_service_waits_as_its_layers_are_run(tmp_path, family: str) -> None:
    """Set before torch is loaded, which reads it. By torch's own operations threads sleep at once."""
    small_model(family).save_pretrained(tmp_path)
    by_kernels = family == "Llama" and "amx_bf16" not in cpuinfo() and compiler() is not None
    assert said(SERVED, tmp_path) == f"{20_000 if by_kernels else 0} False"
    assert said(SERVED, tmp_path, CXX="no-such-compiler") == "0 False"
    assert said(SERVED, tmp_path, FIRSTTOKEN_ACCELERATOR="none") == "0 False"
    assert said(SERVED, tmp_path, GOMP_SPINCOUNT="7") == "7 False"


@pytest.mark.parametrize("chosen", ["none", "onednn"])
def test_notebooks_wait_briefly(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    """Those that the command line runs, and one that is opened by hand."""
    monkeypatch.setenv(ACCELERATOR, chosen)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert kernel_forkserver.surroundings()["GOMP_SPINCOUNT"] == "0"
    assert said(OPENED) == "0 False"
    assert wait_policy(few_loops=True) == {"GOMP_SPINCOUNT": "20000"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert wait_policy(few_loops=True) == {} and "GOMP_SPINCOUNT" not in kernel_forkserver.surroundings()
