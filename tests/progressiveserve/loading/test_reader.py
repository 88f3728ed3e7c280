"""The reader: the right bytes for whoever waits, over links of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dying_link import DyingLink
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from read_blobs import CHUNK, content, make_blob, read

from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.loading.reader import PAGE, Blob, BlobReader, even_groups, host_memory
from firsttoken.study.errors import LinkError
from firsttoken_studies.probes.pagecache import evict, resident_fraction

ONLY_STDLIB = """
import sys
import firsttoken.link.shaped, firsttoken.progressiveserve.checkpoint.manifest
import firsttoken.progressiveserve.loading.reader, firsttoken.progressiveserve.loading.read_plan
import firsttoken_studies.progressiveserve.coldstart.trial
print(sorted({"torch", "numpy", "transformers", "peft", "safetensors", "tqdm", "yaml"} & set(sys.modules)))
"""


def test_a_worker_can_read_before_it_imports_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ONLY_STDLIB], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 6000), min_size=0, max_size=7),
    chunk=st.integers(1, 7000).map(lambda n: max(n, 97)),
    threads=st.integers(1, 5),
    links=st.integers(1, 4),
)
def test_the_bytes_arrive(tmp_path: Path, sizes: list, chunk: int, threads: int, links: int) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", size) for i, size in enumerate(sizes)]
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
    blobs = [make_blob(tmp_path / f"{i}.bin", size) for i, size in enumerate(sizes)]
    make_cold(blobs)
    wires = [Link(LinkConfig(gbit_per_s)) for _ in range(links)]
    assert read(blobs, wires, threads=threads, chunk_bytes=chunk) == [content(blob) for blob in blobs]
    assert sum(wire.bytes_moved for wire in wires) == sum(sizes)


@pytest.mark.parametrize(
    "gone", ["O_DIRECT", "RWF_NOWAIT", "posix_fadvise", "preadv", "preadv O_DIRECT RWF_NOWAIT posix_fadvise"]
)
def test_a_system_without_a_facility_reads_the_same(tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 7 * PAGE + 5 * i) for i in range(3)]
    for blob in blobs:
        evict(blob.path)
    for name in gone.split():
        monkeypatch.delattr(os, name, raising=False)
    assert read(blobs, [Link()], threads=2, chunk_bytes=2 * PAGE) == [content(blob) for blob in blobs]


def test_cold_files_and_a_link_that_dies(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 10 * PAGE) for i in range(3)]
    make_cold(blobs)
    link = DyingLink(13 * PAGE + 77)
    found = read(blobs, [link], threads=1, chunk_bytes=PAGE)
    assert found[0] == content(blobs[0]) and "the link died" in str(found[1])
    link.restore()
    assert read(blobs, [link], threads=2) == [content(blob) for blob in blobs]


def test_files_begin_at_a_page_and_are_writable(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 700) for i in range(20)]
    reader = BlobReader(blobs, [Link()])
    reader.start()
    for i in reversed(range(len(blobs))):  # any order of asking
        data = reader.wait(i)
        assert not data.readonly and np.frombuffer(data, dtype=np.uint8).ctypes.data % PAGE == 0
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
    groups = even_groups(sizes, count)
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
    groups = even_groups(sizes, count)
    assert [sum(sizes[i] for i in group) for group in groups] == expected


def test_each_link_moves_its_share_and_the_first_file_does_not_wait_for_the_last(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / f"{i}.bin", 20_000) for i in range(6)]
    wires = [Link(), DyingLink(0), Link()]
    found = read(blobs, wires, threads=1)
    assert all(isinstance(found[i], LinkError) for i in (2, 3)) and wires[1].bytes_moved == 0
    assert wires[0].bytes_moved <= 40_000 and wires[2].bytes_moved <= 40_000
    assert read(blobs, [DyingLink(45_000)], threads=1, chunk_bytes=CHUNK)[:2] == [
        content(blob) for blob in blobs[:2]
    ], "files in order"
