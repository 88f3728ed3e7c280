"""Loads from a data server: the same model, resumed where a connection drops, one line when it cannot be had."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from waiting import until

from firsttoken.link.data_server import DataServer
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.loading.http_reader import Remote, RemotePath
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.loading.read_plan import part_blobs
from firsttoken.progressiveserve.loading.reader import Blob, BlobReader
from firsttoken.study.errors import LinkError, ModelError

Serve = Callable[[Path], RemotePath]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves folders in threads of this process until the test ends."""
    servers: list[DataServer] = []

    def start(folder: Path) -> RemotePath:
        servers.append(DataServer(folder, Link()))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return RemotePath(Remote(servers[-1].address))

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def fails(blobs: list[Blob], link: Link | None = None) -> Exception:
    """What a load of ``blobs`` that cannot end well says, to everybody the same."""
    reader = BlobReader(blobs, [link or Link()], threads=3, chunk_bytes=20_000)
    reader.start()
    found = []
    for index in range(len(blobs)):
        try:
            reader.wait(index)
        except (LinkError, ModelError) as error:
            found.append(error)
    reader.close()
    assert found and all(error is found[0] for error in found) and "\n" not in str(found[0])
    return found[0]


def test_a_staged_load_is_that_of_the_folder_bit_for_bit(stage, serve: Serve) -> None:
    staged = stage(adapters=(1, 2))
    manifest, link = read_manifest(staged.folder), Link()
    meta_model = MetaModel(staged.folder, manifest)
    view, folder = meta_model.empty_view(), serve(staged.folder)
    for stages in ((1,), (2, 3)):
        view = StageLoad(folder, manifest, stages, [link], meta_model, view, threads=3).wait()
    view.activate(meta_model.model)
    expected = dict(staged.served.model.named_parameters())
    for name, parameter in meta_model.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert link.bytes_moved >= sum(part.bytes for s in manifest.stages for part in s.parts)
    assert not [thread for thread in folder.server._connections if not thread.is_alive()], "connections stay open"


def test_a_wrong_hash_a_wrong_length_and_a_missing_file_are_refused(stage, serve: Serve) -> None:
    staged = stage()
    folder = serve(staged.folder)
    blobs = part_blobs(folder, read_manifest(staged.folder), (1, 2, 3))
    wrong = [replace(blobs[0], sha256="0" * 64), *blobs[1:]]
    assert "has a wrong sha256; copy it again" in str(fails(wrong))
    longer = [replace(blobs[0], bytes=blobs[0].bytes + 1), *blobs[1:]]
    assert f"has {blobs[0].bytes:,} of {blobs[0].bytes + 1:,} bytes on http://" in str(fails(longer))
    (staged.folder / blobs[2].path.path.lstrip("/")).unlink()
    error = fails(blobs)
    assert isinstance(error, ModelError) and "is missing on http://127.0.0.1:" in str(error)


class Dropping(threading.Thread):
    """Stands between reader and server and cuts each connection after ``count`` bytes of answers, ``drops`` times."""

    def __init__(self, server: tuple[str, int], count: int, drops: int) -> None:
        super().__init__(daemon=True)
        self._server, self._count, self.left = server, count, drops
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            upstream = socket.create_connection(self._server)
            threading.Thread(target=self._pump, args=(client, upstream, None), daemon=True).start()
            cut = self._count if self.left > 0 else None
            self.left -= 1
            threading.Thread(target=self._pump, args=(upstream, client, cut), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(4096 if left is None else min(4096, left))) and left != 0:
                target.sendall(data)
                left = None if left is None else left - len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()


def test_a_dropped_connection_is_resumed_where_it_broke(tmp_path: Path, serve: Serve) -> None:
    content = random.Random(1).randbytes(200_000)
    (tmp_path / "a.bin").write_bytes(content)
    server = serve(tmp_path).server
    between = Dropping(server._endpoint, count=30_000, drops=5)
    link = Link()
    blob = Blob(RemotePath(Remote(between.address)) / "a.bin", "layer 00", len(content), "")
    reader = BlobReader([blob], [link], threads=1, verify=False)
    reader.start()
    assert bytes(reader.wait(0)) == content
    reader.close()
    between.close()
    assert between.left < 0 and link.bytes_moved == len(content), "each byte came once"


def test_a_server_killed_in_the_middle_of_a_load_is_one_clear_error(stage) -> None:
    staged = stage()
    command = [sys.executable, "-m", "firsttoken.link.data_server", str(staged.folder), "--gbit-per-s", "0.0005"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        folder = RemotePath(Remote(server.stdout.readline().strip()))
        blobs = part_blobs(folder, read_manifest(staged.folder), (1, 2, 3))
        link = Link()
        killer = threading.Thread(target=lambda: (until(lambda: link.bytes_moved, "some have come"), server.kill()))
        killer.start()
        error = fails(blobs, link)
        killer.join()
    assert isinstance(error, LinkError) and 0 < link.bytes_moved < sum(blob.bytes for blob in blobs)
    assert "cannot be read: reading at byte" in str(error) and f"data server {folder.server.address}: " in str(error)


@pytest.mark.parametrize("address", ["127.0.0.1:80", "https://host", "http://", "http://host:port", ""])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(LinkError, match="is no address of a data server; one is like"):
        Remote(address)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    blob = Blob(RemotePath(Remote(address)) / "a.bin", "layer 00", 10, "")
    assert "layer 00: a.bin cannot be read: reading at byte 0: data server" in str(fails([blob], Link(LinkConfig(1.0))))
