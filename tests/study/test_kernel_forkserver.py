"""A copy of the warm process behaves as a fresh process would: streams, folder, environment, signals, exit status."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from firsttoken_studies.record import kernel_forkserver

pytestmark = pytest.mark.skipif(not kernel_forkserver.possible(), reason="processes are not copied here")


@pytest.fixture(scope="module")
def alive() -> Iterator[None]:
    """A warm process that has imported next to nothing: what it has in memory is not what is tested."""
    patch = pytest.MonkeyPatch()
    patch.delenv(kernel_forkserver.SOCKET, raising=False)
    with kernel_forkserver.warmed(["json", "no_such_module", "faulthandler:enable"]):
        assert kernel_forkserver.SOCKET in os.environ
        yield
    patch.undo()


@pytest.fixture
def start(alive, tmp_path: Path):
    """Starts a module of the given source as a copy."""

    def begin(source: str, **environment: str) -> subprocess.Popen:
        (tmp_path / "asked.py").write_text(f"import sys\n{source}", encoding="utf-8")
        command = kernel_forkserver.command("asked", [])
        return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=tmp_path, env=os.environ | environment)

    return begin


def test_streams_folder_environment_and_status_are_the_clients_own(start, tmp_path: Path) -> None:
    source = "import os\nprint(os.getcwd(), os.environ['WANTED'])\nprint('oh', file=sys.stderr)\nsys.exit(7)"
    process = start(source, WANTED="here")
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == (f"{tmp_path} here\n", "oh\n", 7)
    assert start("").wait(60) == 0


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_streams_are_of_the_kind_that_the_client_has(start, name: str) -> None:
    """The warm process may write to a file, in which a stream has a place, and its copy to a pipe, which has none."""
    source = f"sys.{name}.reconfigure(encoding='ascii', errors='replace')\nprint('fine', file=sys.{name})"
    process = start(source)
    out, err = process.communicate(timeout=60)
    assert (out + err, process.returncode) == ("fine\n", 0)


def test_what_the_warm_process_was_told_to_call_was_called(start) -> None:
    out, _ = start("import faulthandler\nprint(faulthandler.is_enabled())").communicate(timeout=60)
    assert out == "True\n"


def test_it_runs_on_the_processors_of_its_client(start) -> None:
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        process = start("import os\nprint(os.sched_getaffinity(0))")
    finally:
        os.sched_setaffinity(0, mine)
    assert process.communicate(timeout=60)[0] == f"{{{min(mine)}}}\n"


def test_an_exception_is_a_traceback_and_status_1(start) -> None:
    process = start("raise ValueError('no')")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "ValueError: no" in err


def test_copies_share_nothing(start) -> None:
    source = "import json\nprint(getattr(json, 'left', None))\njson.left = 1"
    assert [start(source).communicate(timeout=60)[0] for _ in range(2)] == ["None\n"] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_copy(start, number: int) -> None:
    process = start("import time\nprint('up', flush=True)\ntime.sleep(300)")
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number


def test_a_client_that_is_gone_before_its_copy_is_known_leaves_none(alive, tmp_path: Path) -> None:
    """Its streams are the copy's, too: whoever reads them would wait for a copy that nobody ends."""
    (tmp_path / "asked.py").write_text("import time\ntime.sleep(300)", encoding="utf-8")
    for _ in range(20):
        end, theirs = os.pipe()
        asked = {"module": "asked", "arguments": [], "folder": str(tmp_path), "environment": dict(os.environ)}
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.environ[kernel_forkserver.SOCKET])
            socket.send_fds(client, [json.dumps(asked).encode()], [theirs] * 3)
        os.close(theirs)
        assert select.select([end], [], [], 60)[0] and os.read(end, 1) == b"", "the copy lives on"
        os.close(end)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_before_there_is_a_copy_end_the_client(tmp_path: Path, number: int) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "warm"))
        silent.listen()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(kernel_forkserver.CLIENT), str(tmp_path / "warm"), "asked"]
        )
        with silent.accept()[0] as client:
            assert client.recv(1 << 16)
            process.send_signal(number)
            assert process.wait(60) == 128 + number


def test_a_copy_ends_with_its_client(start) -> None:
    process = start("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(300)")
    copy = int(process.stdout.readline())
    process.kill()
    process.wait()
    for _ in range(300):
        try:
            os.kill(copy, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("the copy lives on")


def test_without_a_warm_process_it_is_an_ordinary_one(monkeypatch) -> None:
    monkeypatch.delenv(kernel_forkserver.SOCKET, raising=False)
    assert kernel_forkserver.command("papermill", ["a"]) == [sys.executable, "-m", "papermill", "a"]
    monkeypatch.setattr(kernel_forkserver, "possible", lambda: False)
    with kernel_forkserver.warmed():
        assert kernel_forkserver.SOCKET not in os.environ
