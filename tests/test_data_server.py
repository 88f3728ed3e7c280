"""The data server by itself: which bytes it sends for which range, to whom it sends none, and at which rate."""

from __future__ import annotations

import http.client
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from firsttoken.link.data_server import DataServer, byte_range
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.study.errors import LinkError

CONTENT = random.Random(0).randbytes(700_001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("not served")
    (tmp_path / "served" / "stage 1").mkdir(parents=True)
    (tmp_path / "served" / "stage 1" / "a.bin").write_bytes(CONTENT)
    (tmp_path / "served" / "empty").touch()
    (tmp_path / "served" / "out").symlink_to(tmp_path / "secret")
    return tmp_path / "served"


@pytest.fixture
def connection(folder: Path) -> Iterator[http.client.HTTPConnection]:
    server = DataServer(folder, Link())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    yield connection
    connection.close()
    server.shutdown()
    server.server_close()


def get(connection: http.client.HTTPConnection, path: str, asked: str | None = None) -> tuple[int, str | None, bytes]:
    connection.request("GET", path, headers={"Range": asked} if asked else {})
    answer = connection.getresponse()
    return answer.status, answer.headers.get("Content-Range"), answer.read()


@pytest.mark.parametrize(
    ("asked", "status", "begin", "end"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=10-19", 206, 10, 20),
        ("bytes=90-", 206, 90, 100),
        ("bytes=-10", 206, 90, 100),
        ("bytes=-500", 206, 0, 100),
        ("bytes=95-500", 206, 95, 100),
        ("bytes=100-", 416, 0, 0),
        ("bytes=100-200", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
        (None, 200, 0, 100),
        ("bytes=-", 200, 0, 100),
        ("bytes=20-10", 200, 0, 100),
        ("bytes=0-1,5-6", 200, 0, 100),
        ("lines=1-2", 200, 0, 100),
        ("bytes=a-b", 200, 0, 100),
        (f"bytes={10**30}-", 200, 0, 100),
    ],
)
def test_a_range_header_means_what_rfc_9110_says(asked: str | None, status: int, begin: int, end: int) -> None:
    assert byte_range(asked, 100) == (status, begin, end)


def test_ranges_of_one_connection(connection: http.client.HTTPConnection) -> None:
    path = "/stage%201/a.bin"
    assert get(connection, path) == (200, None, CONTENT)
    assert get(connection, path, "bytes=5-300004") == (206, "bytes 5-300004/700001", CONTENT[5:300_005])
    assert get(connection, path, "bytes=-3") == (206, "bytes 699998-700000/700001", CONTENT[-3:])
    assert get(connection, path, "bytes=700001-") == (416, "bytes */700001", b"")
    assert get(connection, "/empty") == (200, None, b"") and get(connection, "/empty", "bytes=0-")[0] == 416


@pytest.mark.parametrize(
    "path", ["/none", "/", "/stage%201", "/../secret", "/%2e%2e/secret", "//etc/passwd", "/out", "/a%00b"]
)
def test_nothing_outside_the_folder_and_no_folder(connection: http.client.HTTPConnection, path: str) -> None:
    assert get(connection, path)[0] == 404


@pytest.mark.parametrize("path", ["/" + "a" * 300, "/" + "a/" * 3000, "/%ff%fe", "/circle", "//[::1", "/%ed%a0%80"])
def test_a_name_that_no_file_can_have_is_not_found_and_nothing_is_printed(
    connection: http.client.HTTPConnection, folder: Path, path: str, capfd: pytest.CaptureFixture
) -> None:
    (folder / "circle").symlink_to(folder / "circle")
    assert get(connection, path)[0] == 404 and get(connection, "/empty")[0] == 200
    assert capfd.readouterr().err == ""


def test_all_connections_together_are_held_to_the_rate(folder: Path) -> None:
    command = [sys.executable, "-m", "firsttoken.link.data_server", str(folder), "--gbit-per-s", "0.02"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        host, _, port = server.stdout.readline().strip().removeprefix("http://").partition(":")
        fetched: list[bytes] = []

        def fetch() -> None:
            fetched.append(get(http.client.HTTPConnection(host, int(port), timeout=60), "/stage%201/a.bin")[2])

        begin = time.monotonic()
        threads = [threading.Thread(target=fetch) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.monotonic() - begin
        server.terminate()
    assert fetched == [CONTENT, CONTENT] and took > 0.9 * 2 * len(CONTENT) / (0.02e9 / 8)


def test_what_cannot_be_served_is_one_line(folder: Path) -> None:
    with pytest.raises(LinkError, match="nowhere is no folder; name one to serve"):
        DataServer(folder / "nowhere", Link())
    taken = DataServer(folder, Link(LinkConfig(1.0)))
    with pytest.raises(LinkError, match=f"cannot listen on 127.0.0.1:{taken.server_address[1]}"):
        DataServer(folder, Link(), port=taken.server_address[1])
    taken.server_close()
