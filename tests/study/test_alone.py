"""Two at once that write the same files: one works, the other says that it waits, and a dead one holds up nobody."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from waiting import until

from firsttoken.assets.fetch import PIP_KEEPS
from firsttoken.study import paths
from firsttoken.study.profile import load_profile
from firsttoken.study.system.alone import alone
from firsttoken_studies import running
from firsttoken_studies.record import kernel_forkserver

LIB = Path(__file__).parents[2] / "lib"
HOLD = """
import sys, time
from pathlib import Path
from firsttoken.study.system.alone import alone
with alone(Path(sys.argv[1]), "works"):
    print("in", flush=True)
    sys.stdin.readline()
"""
COUNT = """
import sys
from pathlib import Path
from firsttoken.study.system.alone import alone
lock, counter = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(40):
    with alone(lock, "counts"):
        counter.write_text(str(int(counter.read_text()) + 1))
"""
# a python that "installs" until the file `go` is there; all else is done by the real one, or is there
PYTHON = f"""#!/bin/sh
here="$(dirname -- "$0")/../.."
case "$*" in
    *"pip install"*)
        echo "$$" >>"$here/installed"
        env >"$here/environment"
        while [ ! -e "$here/go" ]; do sleep 0.02; done
        ;;
    *"-m pip"* | *compileall* | "- "* | "-c import openai" | "-c import firsttoken") ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def started(*command: str | Path, **environment: str) -> subprocess.Popen[str]:
    """A process in a group of its own."""
    return subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | {"PYTHONPATH": str(LIB)} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that the test ends, if nothing else does."""
    all_of_them: list[subprocess.Popen[str]] = []

    def start(*command: str | Path, **environment: str) -> subprocess.Popen[str]:
        all_of_them.append(started(*command, **environment))
        return all_of_them[-1]

    yield start
    for process in all_of_them:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def holding(run: Callable[..., subprocess.Popen[str]], lock: Path) -> subprocess.Popen[str]:
    process = run(sys.executable, "-c", HOLD, lock)
    assert process.stdout.readline() == "in\n"
    return process


def test_the_second_says_that_it_waits(tmp_path: Path, run) -> None:
    lock = tmp_path / "new" / ".lock"
    first = holding(run, lock)
    second = run(sys.executable, "-c", HOLD, lock)
    assert second.stderr.readline() == f"firsttoken: process {first.pid} works; this one waits for it\n"
    assert second.poll() is None
    assert first.communicate("go\n", timeout=60) == ("", "") and first.returncode == 0
    assert second.communicate("go\n", timeout=60) == ("in\n", "") and second.returncode == 0
    assert not list(lock.parent.iterdir())


def test_who_was_killed_holds_up_nobody(tmp_path: Path, run) -> None:
    lock = tmp_path / ".lock"
    first = holding(run, lock)
    first.kill()
    first.wait()
    assert lock.exists()
    second = holding(run, lock)
    assert second.communicate("go\n", timeout=60) == ("", "")
    assert not lock.exists()


def test_one_at_a_time_though_the_file_comes_and_goes(tmp_path: Path, run) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [run(sys.executable, "-c", COUNT, tmp_path / ".lock", counter) for _ in range(4)]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert counter.read_text() == "160"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What sets up an environment, and environments whose pip waits for the test."""
    folder = tmp_path / "a clone"
    for name in ("env", "lib/firsttoken/study/system"):
        shutil.copytree(paths.ROOT / name, folder / name)
    shutil.copy(paths.ROOT / "pyproject.toml", folder)
    for venv in (".venv", ".venv-clients", ".venv-vllm"):
        python = folder / venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
    return folder


SETUPS = {"env/setup.sh": ".venv", "env/clients/setup.sh": ".venv-clients", "env/vllm/setup.sh": ".venv-vllm"}


@pytest.mark.parametrize("script", SETUPS)
def test_two_set_ups_at_once_install_once(clone: Path, run, script: str) -> None:
    first = run("bash", clone / script)
    until((clone / "installed").exists, "it has begun")
    second = run("bash", clone / script, SHELLOPTS="noclobber")
    said = f"firsttoken: process {first.pid} sets up {SETUPS[script]}; this one waits for it\n"
    assert second.stderr.readline() == said
    (clone / "go").touch()
    first.communicate(timeout=60)
    installed = (clone / "installed").read_text()
    _, complaint = second.communicate(timeout=60)
    assert (first.returncode, second.returncode, complaint) == (0, 0, "")
    assert (clone / "installed").read_text() == installed
    assert (clone / SETUPS[script] / "firsttoken.stamp").exists()


@pytest.mark.parametrize("script", SETUPS)
def test_what_is_exported_for_other_packages_does_not_reach_pip(clone: Path, run, script: str) -> None:
    """As NVIDIA's images export a constraint. Where packages come from does."""
    (clone / "go").touch()
    others = "CONSTRAINT Constraint BUILD_CONSTRAINT REQUIREMENT TARGET PREFIX ROOT NO_BINARY ONLY_BINARY PRE PLATFORM"
    others += " REQUIRE_HASHES REQUIRE_VIRTUALENV NO_BUILD_ISOLATION CONFIG_SETTINGS IGNORE_INSTALLED DRY_RUN EDITABLE"
    given = {f"PIP_{name}": "x" for name in [*others.split(), *PIP_KEEPS]} | {"PYTHONHOME": "", "PIP_USER": "1"}
    process = run("bash", clone / script, **given)
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
    lines = dict(line.split("=", 1) for line in (clone / "environment").read_text().splitlines() if "=" in line)
    pips = {name[4:]: value for name, value in lines.items() if name.startswith("PIP_")}
    assert pips == dict.fromkeys(PIP_KEEPS, "x") | {"USER": "0", "NO_DEPS": "0"}


@pytest.mark.parametrize("script", SETUPS)
def test_a_set_up_that_was_killed_holds_up_nobody(clone: Path, run, script: str) -> None:
    first = run("bash", clone / script)
    until((clone / "installed").exists, "it has begun")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    (clone / "go").touch()
    second = run("bash", clone / script)
    _, complaint = second.communicate(timeout=60)
    assert (second.returncode, complaint) == (0, "")


def test_a_pip_that_has_outlived_its_shell_is_waited_for(clone: Path, run) -> None:
    first = run("bash", clone / "env/setup.sh")
    until((clone / "installed").exists, "it has begun")
    first.kill()
    first.wait()
    second = run("bash", clone / "env/setup.sh")
    assert "sets up .venv; this one waits for it" in second.stderr.readline()
    (clone / "go").touch()
    second.communicate(timeout=60)
    assert second.returncode == 0


def test_two_runs_into_the_same_folder(root: Path, monkeypatch) -> None:
    """The lock is of an open file, so that a thread waits as a process does, which would import torch first."""
    monkeypatch.setenv(kernel_forkserver.SOCKET, "none is needed")
    said = SimpleQueue[str]()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=said.put, flush=lambda: None))
    with ThreadPoolExecutor() as pool:
        with alone(paths.EXECUTED / ".lock", "runs"):
            second = pool.submit(running.run_notebooks, [], load_profile("quick"), published=False)
            what = f"process {os.getpid()} runs notebooks whose results go to {paths.OUT}"
            assert said.get(timeout=60) == f"firsttoken: {what}; this one waits for it"
            assert not second.done()
        assert second.result(60) == 0
