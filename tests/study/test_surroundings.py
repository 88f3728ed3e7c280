"""What a shell or a batch system exports changes nothing: CDPATH, ~ in variables, an encoding that is not UTF-8."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import firsttoken.__main__ as program
from firsttoken.__main__ import INTERRUPTED, main
from firsttoken.study import paths

SCRIPTS = ("run_all.sh", "env/setup.sh", "env/clients/setup.sh", "env/vllm/setup.sh", "tests/run.sh", "tests/fuzz.sh")


@pytest.fixture(params=["clone", "-first token é", "linked"])
def clone(tmp_path: Path, request) -> Path:
    """The scripts of a clone; folders of the same names lie where CDPATH would find them."""
    folder = tmp_path / ("clone" if request.param == "linked" else request.param)
    for name in (*SCRIPTS, "env/venv.sh", "env/alone.sh", ".ci/run"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(paths.ROOT / name, folder / name)
    for name in ("clone", "env", "env/clients", "env/vllm", "tests", "-first token é"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True, exist_ok=True)
    if request.param == "linked":
        (tmp_path / "linked").symlink_to(folder)
    return tmp_path / request.param


@pytest.mark.parametrize("exported", [{"CDPATH": ".:../elsewhere:elsewhere"}, {"SHELLOPTS": "noclobber"}, {}])
def test_scripts_go_to_their_own_clone(clone: Path, exported: dict[str, str]) -> None:
    """Each is asked where it works: `$PWD` or its root, when its last own line would begin."""
    environment = {name: value for name, value in os.environ.items() if name != "SHELLOPTS"} | exported
    for script, asked in {
        "run_all.sh": "source env/setup.sh",
        "env/setup.sh": "firsttoken_fail() {",
        "env/clients/setup.sh": "source",
        "env/vllm/setup.sh": "source",
        "tests/run.sh": 'case "${1:-}" in',
        "tests/fuzz.sh": "[[",
    }.items():
        path = clone / script
        lines = path.read_text(encoding="utf-8").splitlines()
        at = next(number for number, line in enumerate(lines) if line.startswith(asked))
        path.write_text("\n".join([*lines[:at], 'echo "${firsttoken_root:-${root:-$PWD}}"; exit']), encoding="utf-8")
        start = Path(clone.name) / script
        ran = subprocess.run(
            ["bash", "--", str(start)], cwd=clone.parent, env=environment, capture_output=True, text=True, timeout=60
        )
        assert (ran.returncode, ran.stderr) == (0, ""), script
        said = ran.stdout.splitlines()
        assert len(said) == 1 and Path(said[0]).resolve() == clone.resolve(), script


@pytest.mark.parametrize("variable", ["FIRSTTOKEN_CACHE", "FIRSTTOKEN_OUT", "FIRSTTOKEN_ROOT"])
def test_a_variable_may_begin_with_a_tilde(tmp_path: Path, monkeypatch, variable: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for text, folder in {"~/a": "a", "~/a/": "a", "a": "a", "./x/../a": "a", "": "other", " ": "other"}.items():
        monkeypatch.setenv(variable, text)
        assert paths.named(variable, tmp_path / "other") == (tmp_path / folder).resolve()


def test_the_cache_is_the_clones_wherever_results_go(tmp_path: Path, monkeypatch) -> None:
    clone, out = tmp_path / "clone", tmp_path / "out"
    clone.mkdir()
    assert paths.cache_of(clone, out) == clone / ".cache"
    (clone / ".cache").mkdir()
    assert paths.cache_of(clone, out) == clone / ".cache"
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(clone))
    assert paths.cache_of(clone, out) == out / ".cache"


@pytest.mark.parametrize(
    ("encoding", "words"),
    [("ascii", ["claims"]), *product(("latin-1", "ascii", "cp1252"), (["--help"], ["run", "--only", "é≥한"]))],
)
def test_a_terminal_that_lacks_a_character_shows_the_rest(monkeypatch, encoding: str, words: list[str]) -> None:
    terminals = {name: io.TextIOWrapper(io.BytesIO(), encoding) for name in ("stdout", "stderr")}
    for name, terminal in terminals.items():
        monkeypatch.setattr(sys, name, terminal)
    try:
        status = main(words)
    except SystemExit as ended:
        status = ended.code
    for terminal in terminals.values():
        terminal.flush()
    assert status == (2 if "--only" in words else 0)
    assert terminals["stderr" if status else "stdout"].buffer.getvalue().strip()


@pytest.mark.parametrize("command", [one.__name__ for one in program.COMMANDS])
def test_the_help_of_every_command_is_shown_in_ascii(monkeypatch, command: str) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    terminal.flush()
    assert ended.value.code == 0 and f"usage: firsttoken {command}".encode() in terminal.buffer.getvalue()


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["hears", "in a background"])
def of_a_shell(request):
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("of_a_shell")
@pytest.mark.parametrize("command", ["run", "measure", "capacity", "fetch"])
def test_the_end_of_a_batch_job_is_an_interruption(monkeypatch, capsys, command: str) -> None:
    """A batch system ends a job by SIGTERM, which would end Python at once and leave what is half-written."""
    cleaned = []

    def interrupted(options: argparse.Namespace) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
            return 0
        finally:
            cleaned.append(True)

    interrupted.__name__ = command
    before = signal.getsignal(signal.SIGTERM)
    commands = tuple(interrupted if one.__name__ == command else one for one in program.COMMANDS)
    monkeypatch.setattr(program, "COMMANDS", commands)
    needed = {"measure": ["throughput"], "capacity": ["--scheduler", "sarathi"]}.get(command, [])
    assert main([command, *needed]) == INTERRUPTED and cleaned
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_wheel_serves_folders_and_says_which_commands_are_a_clones(tmp_path: Path) -> None:
    """The packages lie alone, as `pip install .` puts them; one process tries every command."""
    site = tmp_path / "lib" / "python3" / "site-packages"
    shutil.copytree(paths.ROOT / "lib", site, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    tried = {
        "fetch": [],
        "run": ["--list"],
        "measure": ["sizes"],
        "capacity": ["--scheduler", "sarathi"],
        "try": ["victim", "x.py"],
        "claims": [],
        "record": [],
        "site": ["out"],
        "stage": ["out"],
        "serve": [],
        "doctor": [],
        "prefix": ["list", "nowhere"],
        "swarm": ["list", "--model", "nowhere", "--registry", "127.0.0.1:1"],
    }
    assert tried.keys() == {one.__name__ for one in program.COMMANDS}
    script = "import sys; from firsttoken.__main__ import main\nfor words in eval(sys.argv[1]): print(main(words))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FIRSTTOKEN_")}
    words = [[name, *more] for name, more in tried.items()] + [["serve", "nowhere"]]
    ran = subprocess.run(
        [sys.executable, "-c", script, repr(words)],
        env=environment | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = ran.stderr.splitlines()
    clones = [name for name in tried if name not in program.ANYWHERE]
    mends = [f"firsttoken: `firsttoken {name}` works on the files of a clone" for name in clones]
    mends += ["firsttoken: `firsttoken serve` without a FOLDER works on the files of a clone"]
    assert [line.split(", and ")[0] for line in lines[: len(mends)]] == mends
    assert all(line.endswith("or set FIRSTTOKEN_ROOT to the clone") for line in lines[: len(mends)])
    assert len(lines) == len(mends) + 3 and all("nowhere" in line for line in lines[len(mends) :]), lines
    assert f"clone: none at {tmp_path / 'lib' / 'python3'}; FIRSTTOKEN_ROOT names one" in ran.stdout
