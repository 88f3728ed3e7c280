"""The reader: the right bytes for whoever waits, and one clear line for every way a file can fail it."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.link import Link, LinkConfig
from firsttoken.progressive.loading.reader import PAGE, Blob, BlobReader, _groups, host_memory
from firsttoken.study.errors import FirstTokenError, LinkError, ModelError
from firsttoken.study.system.pagecache import evict, resident_fraction

CHUNK = 1000
ONLY_STDLIB = """
import sys
import firsttoken.link, firsttoken.progressive.checkpoint.manifest
import firsttoken.progressive.loading.reader, firsttoken.progressive.loading.blobs
import firsttoken.progressive.coldstart.trial
print(sorted({"torch", "numpy", "transformers", "safetensors", "tqdm"} & set(sys.modules)))
"""


@pytest.fixture(autouse=True)
def _quiet_threads() -> Iterator[None]:
    """A reader never dies with a traceback, and none outlives its test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", pytest.PytestUnhandledThreadExceptionWarning)
        yield
    for thread in threading.enumerate():
        if thread.name.startswith("reader-"):
            thread.join(60)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]


def make_blob(path: Path, size: int, data_start: int = 0) -> Blob:
    content = random.Random(size).randbytes(size)
    path.write_bytes(content)
    return Blob(path, f"layer {path.stem}", size, hashlib.sha256(content).hexdigest(), data_start)


@pytest.fixture
def blobs(tmp_path: Path) -> list[Blob]:
    """Six files of two and a half chunks each."""
    return [make_blob(tmp_path / f"{i:02}.bin", 2500 + i, data_start=8 * i) for i in range(6)]


def outcome(reader: BlobReader, index: int) -> bytes | Exception:
    try:
        return bytes(reader.wait(index))
    except FirstTokenError as error:
        return error


def outcomes(reader: BlobReader) -> list[bytes | Exception]:
    """What every blob came to; a wait that never ends fails here instead of hanging the run."""
    found: list[bytes | Exception] = []
    waiter = threading.Thread(
        target=lambda: found.extend([outcome(reader, i) for i in range(len(reader.blobs))]), daemon=True
    )
    waiter.start()
    waiter.join(60)
    assert not waiter.is_alive(), f"blob {len(found)} is waited for without end"
    return found


def content(blob: Blob) -> bytes:
    return blob.path.read_bytes()[blob.data_start :]


def test_a_worker_can_read_before_it_imports_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ONLY_STDLIB], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 6000), min_size=0, max_size=7),
    starts=st.lists(st.integers(0, 200), min_size=7, max_size=7),
    chunk=st.integers(1, 7000).map(lambda n: max(n, 97)),
    threads=st.integers(1, 5),
    links=st.integers(1, 4),
)
def test_the_bytes_arrive(tmp_path: Path, sizes: list, starts: list, chunk: int, threads: int, links: int) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", size, min(starts[i], size)) for i, size in enumerate(sizes)]
    wires = [Link() for _ in range(links)]
    reader = BlobReader(blobs, wires, threads=threads, chunk_bytes=chunk)
    reader.start()
    kept = [reader.wait(i) for i in range(len(blobs))]
    reader.close()
    assert [bytes(data) for data in kept] == [content(blob) for blob in blobs]
    assert sum(wire.bytes_moved for wire in wires) == sum(sizes)


def make_cold(blobs: list[Blob]) -> None:
    """Out of the page cache, where readers go past it; a file system that cannot be asked skips the test."""
    for blob in blobs:
        evict(blob.path)
    if any(resident_fraction(blob.path) != 0 for blob in blobs):
        pytest.skip("this file system keeps what it has read")


@pytest.mark.parametrize(("links", "threads", "gbit_per_s"), [(1, 1, 0), (1, 4, 0), (3, 2, 0), (1, 3, 0.05)])
@pytest.mark.parametrize("chunk", [PAGE, 5 * PAGE, 4 << 20])
def test_cold_files_of_any_length(tmp_path: Path, chunk: int, links: int, threads: int, gbit_per_s: float) -> None:
    sizes = [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 7 * PAGE + 5, 30 * PAGE + 4095]
    blobs = [make_blob(tmp_path / f"{i}.bin", size, data_start=min(size, 8 * i)) for i, size in enumerate(sizes)]
    make_cold(blobs)
    wires = [Link(LinkConfig(gbit_per_s)) for _ in range(links)]
    reader = BlobReader(blobs, wires, threads=threads, chunk_bytes=chunk)
    reader.start()
    assert outcomes(reader) == [content(blob) for blob in blobs]
    reader.close()
    assert sum(wire.bytes_moved for wire in wires) == sum(sizes)


@pytest.mark.parametrize(
    "gone", ["O_DIRECT", "RWF_NOWAIT", "posix_fadvise", "preadv", "preadv O_DIRECT RWF_NOWAIT posix_fadvise"]
)
def test_a_system_without_a_facility_reads_the_same(tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 7 * PAGE + 5 * i, data_start=8 * i) for i in range(3)]
    for blob in blobs:
        evict(blob.path)
    for name in gone.split():
        monkeypatch.delattr(os, name, raising=False)
    reader = BlobReader(blobs, [Link()], threads=2, chunk_bytes=2 * PAGE)
    reader.start()
    assert outcomes(reader) == [content(blob) for blob in blobs]
    reader.close()


def test_cold_files_and_a_link_that_dies(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 10 * PAGE) for i in range(3)]
    make_cold(blobs)
    link = Link(fail_after_bytes=13 * PAGE + 77)
    reader = BlobReader(blobs, [link], threads=1, chunk_bytes=PAGE)
    reader.start()
    found = outcomes(reader)
    reader.close()
    assert found[0] == content(blobs[0]) and "the link died" in str(found[1])
    link.restore()
    again = BlobReader(blobs, [link], threads=2)
    again.start()
    assert outcomes(again) == [content(blob) for blob in blobs]
    again.close()


def test_files_begin_at_a_page_and_are_writable_wherever_the_header_ends(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 700, data_start=start) for i, start in enumerate(range(0, 140, 7))]
    reader = BlobReader(blobs, [Link()])
    reader.start()
    for i in reversed(range(len(blobs))):  # any order of asking
        data = reader.wait(i)
        assert not data.readonly and np.frombuffer(data, dtype=np.uint8).ctypes.data % PAGE == blobs[i].data_start
    reader.close()


def test_what_was_handed_over_stays_when_the_reader_is_gone(blobs: list[Blob]) -> None:
    reader = BlobReader(blobs, [Link()])
    reader.start()
    data = [reader.wait(i) for i in range(6)]
    reader.close()
    del reader
    noise = [host_memory(3000) for _ in range(20)]
    assert noise and [bytes(view) for view in data] == [content(blob) for blob in blobs]


@given(sizes=st.lists(st.integers(0, 1000), max_size=12), count=st.integers(1, 5))
def test_links_get_contiguous_groups_of_about_equal_bytes(sizes: list[int], count: int) -> None:
    groups = _groups([Blob(Path(), "", size, "") for size in sizes], count)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    shares = [sum(sizes[i] for i in group) for group in groups]
    assert len(shares) == count
    assert max(shares) <= sum(sizes) / count + max(sizes, default=0)


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([5] * 12, 3, [20, 20, 20]),
        ([1, 1, 100], 2, [2, 100]),
        ([100, *[1] * 10, 100], 3, [100, 10, 100]),  # an untied model: embedding, layers, head
        ([56, *[7] * 30], 4, [63, 70, 63, 70]),  # about SmolLM2-135M
    ],
)
def test_no_link_is_idle_where_there_is_enough_for_all(sizes: list[int], count: int, expected: list[int]) -> None:
    groups = _groups([Blob(Path(), "", size, "") for size in sizes], count)
    assert [sum(sizes[i] for i in group) for group in groups] == expected


def test_each_link_moves_its_share_and_the_first_file_does_not_wait_for_the_last(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 20_000) for i in range(6)]
    wires = [Link(), Link(fail_after_bytes=0), Link()]
    reader = BlobReader(blobs, wires, threads=1)
    reader.start()
    found = outcomes(reader)
    reader.close()
    assert all(isinstance(found[i], LinkError) for i in (2, 3)) and wires[1].bytes_moved == 0
    assert wires[0].bytes_moved <= 40_000 and wires[2].bytes_moved <= 40_000
    reader = BlobReader(blobs, [Link(fail_after_bytes=45_000)], threads=1, chunk_bytes=CHUNK)
    reader.start()
    assert outcomes(reader)[:2] == [content(blob) for blob in blobs[:2]], "files in order"
    reader.close()


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


def test_unverified_bytes_are_taken_as_they_are(blobs: list[Blob]) -> None:
    altered(blobs[3])
    reader = BlobReader(blobs, [Link()], verify=False)
    reader.start()
    assert outcomes(reader) == [content(blob) for blob in blobs]
    reader.close()


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
    reader = BlobReader(blobs, [Interrupted(4, lambda: blobs[2].path.unlink())], threads=threads, chunk_bytes=CHUNK)
    reader.start()
    assert outcomes(reader) == expected
    reader.close()
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
    reader = BlobReader(blobs, [Link()], threads=1, chunk_bytes=CHUNK)
    reader.start()
    found = outcomes(reader)
    reader.close()
    assert isinstance(found[2], LinkError) and "layer 02" in str(found[2])
    assert sorted(closed) == sorted(opened)


def test_a_file_cut_while_it_is_read(blobs: list[Blob]) -> None:
    reader = BlobReader(blobs, [Interrupted(7, lambda: cut_short(blobs[2]))], threads=1, chunk_bytes=CHUNK)
    reader.start()
    found = outcomes(reader)
    reader.close()
    assert found[:2] == [content(blob) for blob in blobs[:2]]
    assert isinstance(found[2], LinkError) and found[3] is found[2]
    assert "layer 02" in str(found[2]) and "02.bin" in str(found[2]) and "early" in str(found[2])


def test_a_link_that_dies_names_the_layer(blobs: list[Blob]) -> None:
    link = Link(fail_after_bytes=6000)
    reader = BlobReader(blobs, [link], threads=1, chunk_bytes=CHUNK)
    reader.start()
    found = outcomes(reader)
    reader.close()
    assert [isinstance(result, LinkError) for result in found] == [False, False, True, True, True, True]
    assert "layer 02" in str(found[2]) and "the link died after 6000 bytes" in str(found[2])
    link.restore()
    again = BlobReader(blobs, [link], threads=3, chunk_bytes=CHUNK)
    again.start()
    assert outcomes(again) == [content(blob) for blob in blobs]
    again.close()


def test_one_dead_link_of_three_stops_the_others(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 30_000) for i in range(6)]
    wires = [Link(LinkConfig(0.001)), Link(fail_after_bytes=100), Link(LinkConfig(0.001))]
    reader = BlobReader(blobs, wires, threads=1, chunk_bytes=CHUNK)
    reader.start()
    found = outcomes(reader)
    reader.close()
    assert all(isinstance(result, LinkError) for result in found)
    assert wires[0].bytes_moved + wires[2].bytes_moved < 60_000, "nobody reads on for a load that has failed"


def test_closing_in_the_middle(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 30_000) for i in range(6)]
    link = Link(LinkConfig(0.001))
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
