"""The reader: one clear line for every way a file or a link can fail it, and no reader left over."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from dying_link import DyingLink
from loads import held_until_closed
from read_blobs import CHUNK, content, make_blob, outcome, outcomes, read

from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.loading.reader import Blob, BlobReader, host_memory
from firsttoken.study.errors import LinkError, ModelError


def cut_short(blob: Blob) -> None:
    os.truncate(blob.path, 1700)


def grown(blob: Blob) -> None:
    with blob.path.open("ab") as file:
        file.write(b"more")


def altered(blob: Blob) -> None:
    blob.path.write_bytes(bytes([blob.path.read_bytes()[0] ^ 1]) + blob.path.read_bytes()[1:])


@pytest.mark.parametrize("links", [1, 3])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda blob: blob.path.unlink(), "03.bin is missing in .*; copy it there"),
        (cut_short, "03.bin has 1,700 of 2,503 bytes; copy it again"),
        (grown, "03.bin has 2,507 of 2,503 bytes"),
        (altered, "03.bin has a wrong sha256; copy it again"),
    ],
    ids=["missing", "truncated", "grown", "altered"],
)
def test_a_bad_file_is_one_line_for_all_that_wait(
    blobs: list[Blob], spoil: Callable[[Blob], None], words: str, threads: int, links: int
) -> None:
    spoil(blobs[3])
    reader = BlobReader(blobs, [Link() for _ in range(links)], threads=threads, chunk_bytes=CHUNK)
    reader.start()
    found = outcomes(reader)
    reader.close()
    assert isinstance(found[3], ModelError)
    for index, result in enumerate(found):
        if isinstance(result, Exception):
            assert result is found[3], "the same error for everyone"
        else:
            assert result == content(blobs[index])
    with pytest.raises(ModelError, match=f"^layer 03: {words}") as caught:
        reader.wait(3)
    assert "\n" not in str(caught.value)


class Interrupted(Link):
    """A link that lets something happen to the files after some of its reads."""

    def __init__(self, reads: int, act: Callable[[], None]) -> None:
        super().__init__()
        self.left, self.act = reads, act

    def read_into(self, handle: int, buffer: memoryview, offset: int) -> None:
        super().read_into(handle, buffer, offset)
        self.left -= 1
        if self.left == 0:
            self.act()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_vanishes_while_it_is_read_is_read_to_its_end(blobs: list[Blob], threads: int) -> None:
    """A load that has begun has every file open: a checkpoint that is replaced meanwhile does not break it."""
    expected = [content(blob) for blob in blobs]
    assert read(blobs, [Interrupted(4, lambda: blobs[2].path.unlink())], threads=threads, chunk_bytes=CHUNK) == expected
    assert not blobs[2].path.exists()


def test_a_reader_closes_what_it_opened_and_nothing_twice(blobs: list[Blob], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is gone between the look at its size and the opening: the old handle is closed once."""
    closed, opened, real_open, real_close = [], [], os.open, os.close

    def opening(path, *args):
        if Path(path) == blobs[2].path:
            blobs[2].path.unlink()
        opened.append(real_open(path, *args))
        return opened[-1]

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "close", lambda handle: (closed.append(handle), real_close(handle)))
    found = read(blobs, [Link()], threads=1, chunk_bytes=CHUNK)
    assert isinstance(found[2], LinkError) and "layer 02" in str(found[2])
    assert sorted(closed) == sorted(opened)


def test_a_file_cut_while_it_is_read(blobs: list[Blob]) -> None:
    found = read(blobs, [Interrupted(7, lambda: cut_short(blobs[2]))], threads=1, chunk_bytes=CHUNK)
    assert found[:2] == [content(blob) for blob in blobs[:2]]
    assert isinstance(found[2], LinkError) and found[3] is found[2]
    assert "layer 02" in str(found[2]) and "02.bin" in str(found[2]) and "early" in str(found[2])


def test_a_link_that_dies_names_the_layer(blobs: list[Blob]) -> None:
    link = DyingLink(6000)
    found = read(blobs, [link], threads=1, chunk_bytes=CHUNK)
    assert [isinstance(result, LinkError) for result in found] == [False, False, True, True, True, True]
    assert "layer 02" in str(found[2]) and "the link died after 6000 bytes" in str(found[2])
    link.restore()
    assert read(blobs, [link], threads=3, chunk_bytes=CHUNK) == [content(blob) for blob in blobs]


def test_one_dead_link_of_three_stops_the_others(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 30_000) for i in range(6)]
    wires = [Link(LinkConfig(0.00003)), DyingLink(100), Link(LinkConfig(0.00003))]  # 8 s for a file, 0.3 s for a chunk
    found = read(blobs, wires, threads=1, chunk_bytes=CHUNK)
    assert all(isinstance(result, LinkError) for result in found)
    assert wires[0].bytes_moved + wires[2].bytes_moved < 60_000, "nobody reads on for a load that has failed"


def test_closing_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 30_000) for i in range(6)]
    link = held_until_closed(monkeypatch, 40_000)
    reader = BlobReader(blobs, [link], threads=2, chunk_bytes=CHUNK)
    reader.start()
    first = reader.wait(0)
    reader.close()
    assert bytes(first) == content(blobs[0])
    moved = link.bytes_moved
    found = outcomes(reader)
    assert moved < 180_000 and link.bytes_moved == moved
    assert isinstance(found[5], LinkError) and "layer 5 was stopped" in str(found[5])


def test_closing_before_the_start_and_twice(blobs: list[Blob]) -> None:
    reader = BlobReader(blobs, [Link()])
    reader.close()
    reader.close()
    assert all(isinstance(result, LinkError) for result in outcomes(reader))


class FewBuffers:
    """As pinned memory is: ``count`` buffers, and who wants another waits until one is given back."""

    def __init__(self, count: int) -> None:
        self._free = threading.Semaphore(count)

    def allocate(self, size: int) -> memoryview:
        if not self._free.acquire(timeout=60):
            raise RuntimeError("no buffer came back")
        return host_memory(size)

    def give_back(self) -> None:
        self._free.release()


class SlowStart(Link):
    """The first chunk of the first file comes last."""

    def __init__(self, others: int) -> None:
        super().__init__()
        self._others = threading.Semaphore(0)
        self._wanted = others

    def read_into(self, handle: int, buffer: memoryview, offset: int) -> None:
        if offset == 0 and self.bytes_moved == 0 and self._wanted:
            wanted, self._wanted = self._wanted, 0
            for _ in range(wanted):
                assert self._others.acquire(timeout=60)
            threading.Event().wait(0.05)  # the others are at the next buffer by now
        super().read_into(handle, buffer, offset)
        self._others.release()


def test_readers_that_wait_for_a_buffer_hold_up_nobody_who_has_one(tmp_path: Path) -> None:
    """On CUDA the readers run ahead until the pinned buffers are used up; the file that would free one must end."""
    blobs = [make_blob(tmp_path / f"{i}.bin", 900) for i in range(8)]
    memory = FewBuffers(3)
    reader = BlobReader(blobs, [SlowStart(2)], threads=3, chunk_bytes=CHUNK, allocate=memory.allocate)
    reader.start()
    found = []
    for index in range(8):
        found.append(outcome(reader, index))
        memory.give_back()
    reader.close()
    assert found == [content(blob) for blob in blobs]
