"""Several servers of a swarm by one command, and what is refused before Ray starts.

A Ray of this machine takes some 20 s to start: ``FIRSTTOKEN_RAY=1 pytest tests/service/test_swarm_servers.py``.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from services import TIMEOUT_S
from swarms import asking, says, varied

from firsttoken.__main__ import main
from firsttoken.petals.remote_model import RemoteModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swarm") / "tiny"
    varied().save_pretrained(folder)
    return folder


@pytest.mark.skipif("FIRSTTOKEN_RAY" not in os.environ, reason="takes 20 s: asked for by FIRSTTOKEN_RAY=1")
def test_two_servers_cover_a_model_and_go_with_the_command(folder) -> None:
    one = asking(varied())(12, 6)
    words = ["swarm", "serve", "--model", str(folder), "--blocks", "auto", "--count", "3", "--dtype", "float32"]
    command = [sys.executable, "-m", "firsttoken", *words, "--servers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            found = [re.fullmatch(r"blocks \[(\d), \d\) of tiny are served at (\S+) by .*\n", line) for line in lines]
            assert all(found), process.stderr.read()
            assert [match[1] for match in found] == ["0", "3"]
            with RemoteModel(folder, [found[0][2]]) as model:
                says(model, one)
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.terminate()
    for match in found:
        host, port = match[2].split(":")
        with pytest.raises(OSError), socket.create_connection((host, int(port)), timeout=5):
            pass


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--servers", "2", "--port", "4000"], "--host, --port, --address and --key are of one server"),
        (["--cluster", "here"], "a cluster is HOST:PORT, as `ray start --head` prints it, not 'here'"),
    ],
)
def test_what_several_servers_cannot_be_told(folder, capsys, more, said) -> None:
    assert main(["swarm", "serve", "--model", str(folder), "--blocks", "0:3", *more]) == 2
    assert said in capsys.readouterr().err
