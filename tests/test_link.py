"""The wire: its rate whatever the readers do, its bytes, its ends."""

from __future__ import annotations

import heapq
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from dying_link import DyingLink
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.link.shaped import BURST_S, Link, LinkConfig, TokenBucket
from firsttoken.study.errors import LinkError

SIZE = 1_500_000


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("link") / "weights.bin"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def handle(weights: Path) -> Iterator[int]:
    opened = os.open(weights, os.O_RDONLY)
    yield opened
    os.close(opened)


late = st.one_of(st.just(0.0), st.floats(0, 0.3))
reads = st.lists(
    st.tuples(st.floats(1e-5, 0.03), late), min_size=1, max_size=12
)  # size and oversleep, in s of the wire


@given(readers=st.lists(st.tuples(late, reads), min_size=1, max_size=5), rate=st.sampled_from([1e6, 125e6]))
def test_no_window_holds_more_than_rate_and_burst(readers: list, rate: float) -> None:
    """Readers on a clock of their own: each books, sleeps until its bytes are there, oversleeps, and books again."""
    bucket, arrivals = TokenBucket(rate), []
    waiting = [(start, index, list(reads)) for index, (start, reads) in enumerate(readers)]
    heapq.heapify(waiting)
    while waiting:
        now, index, ((size, overslept), *rest) = heapq.heappop(waiting)
        count = int(rate * size)
        arrives = max(now, bucket.book(count, now))
        arrivals.append((arrives, count))
        if rest:
            heapq.heappush(waiting, (arrives + overslept, index, rest))
    arrivals.sort()
    for first, last in combinations(range(len(arrivals)), 2):
        counts = [count for _, count in arrivals[first + 1 : last + 1]]
        seconds = arrivals[last][0] - arrivals[first][0]
        assert sum(counts) <= rate * seconds + max(rate * BURST_S, *counts) + 1


@given(counts=st.lists(st.integers(1, 10**6), min_size=1, max_size=20), rate=st.floats(1e6, 1e9))
def test_a_late_reader_loses_nothing_within_the_burst(counts: list[int], rate: float) -> None:
    bucket, now = TokenBucket(rate), 5.0
    for count in counts:
        arrives = bucket.book(count, now)
        now = arrives + BURST_S / 2
    assert arrives == pytest.approx(5.0 + sum(counts) / rate)


def test_an_idle_wire_makes_up_for_its_burst_and_no_more() -> None:
    bucket = TokenBucket(1e6, burst_s=0.5)
    assert bucket.book(1_000_000, 0.0) == 1.0  # nothing is there before the first booking
    assert bucket.book(1_000_000, 60.0) == 60.5


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 400_000)), min_size=1, max_size=6),
    gbit_per_s=st.sampled_from([0.0, 2.0, 40.0]),
)
def test_parallel_readers_get_their_own_bytes(weights: Path, handle: int, pieces: list, gbit_per_s: float) -> None:
    link, content = Link(LinkConfig(gbit_per_s)), weights.read_bytes()
    pieces = [(offset, min(size, SIZE - offset)) for offset, size in pieces]
    buffers = [bytearray(size) for _, size in pieces]
    with ThreadPoolExecutor(len(pieces)) as pool:
        offsets = [offset for offset, _ in pieces]
        list(pool.map(link.read_into, [handle] * len(pieces), map(memoryview, buffers), offsets))
    assert [bytes(buffer) for buffer in buffers] == [content[offset : offset + size] for offset, size in pieces]
    assert link.bytes_moved == sum(size for _, size in pieces)


def test_readers_share_one_wire(handle: int) -> None:
    """Two readers of half the file take as long as one of the whole, and end at about the same time.

    A busy machine keeps one of them waiting now and then, and not three times.
    """
    half, begun_to_first_end = SIZE // 2, []
    for _ in range(3):
        link, ends, together = Link(LinkConfig(0.1)), [], threading.Barrier(2)

        def read(offset: int, link: Link = link, ends: list = ends, together: threading.Barrier = together) -> None:
            together.wait()
            link.read_into(handle, memoryview(bytearray(half)), offset)
            ends.append(time.monotonic())

        start = time.monotonic()
        threads = [threading.Thread(target=read, args=(offset,)) for offset in (0, half)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        floor = SIZE / link.config.bytes_per_s
        assert max(ends) - start >= 0.99 * floor
        begun_to_first_end.append(min(ends) - start)
    assert max(begun_to_first_end) >= 0.6 * floor  # taken in turn, the first would have ended at half of it


@pytest.mark.parametrize(("gbit_per_s", "seconds"), [(0.2, SIZE / 25e6), (0.0, 0.0)])
def test_the_rate_is_the_rate(handle: int, monkeypatch: pytest.MonkeyPatch, gbit_per_s: float, seconds: float) -> None:
    """By a clock that stands while the program works, so that what else the machine does is not in it."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda wait_s: now.append(now.pop() + wait_s))
    monkeypatch.setattr("firsttoken.link.shaped.time", clock)
    Link(LinkConfig(gbit_per_s)).read_into(handle, memoryview(bytearray(SIZE)), 0)
    assert now == [pytest.approx(seconds)]


def test_each_file_waits_for_its_first_byte(handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    link, buffer, waits = Link(LinkConfig(latency_ms=200)), memoryview(bytearray(1000)), []
    monkeypatch.setattr("firsttoken.link.shaped.time.sleep", waits.append)
    link.read_into(handle, buffer, 4096)
    assert waits == []
    link.read_into(handle, buffer, 0)
    assert waits == [0.2]


@pytest.mark.parametrize("gbit_per_s", [0.0, 10.0])
def test_a_link_dies_and_is_restored(weights: Path, handle: int, gbit_per_s: float) -> None:
    link, buffer = DyingLink(1_000_000, LinkConfig(gbit_per_s)), bytearray(SIZE)
    with pytest.raises(LinkError, match="the link died after 1000000 bytes"):
        link.read_into(handle, memoryview(buffer), 0)
    with pytest.raises(LinkError, match="the link died"):  # and stays dead
        link.read_into(handle, memoryview(bytearray(1)), 0)
    assert link.bytes_moved == 1_000_000
    assert buffer[:1_000_000] == weights.read_bytes()[:1_000_000] and not any(buffer[1_000_000:])
    link.restore()
    link.read_into(handle, memoryview(buffer), 0)
    assert buffer == weights.read_bytes()
    assert link.bytes_moved == 1_000_000 + SIZE


@pytest.mark.parametrize("gbit_per_s", [0.0, 10.0])
def test_a_short_file_says_how_short(handle: int, gbit_per_s: float) -> None:
    with pytest.raises(LinkError, match="the file ended 777 bytes early"):
        Link(LinkConfig(gbit_per_s)).read_into(handle, memoryview(bytearray(2000)), SIZE - 1223)


def test_what_the_system_says_is_passed_on(weights: Path) -> None:
    closed = os.open(weights, os.O_RDONLY)
    os.close(closed)
    with pytest.raises(LinkError, match="reading at byte 5: Bad file descriptor"):
        Link().read_into(closed, memoryview(bytearray(8)), 5)


@pytest.mark.parametrize("values", [{"gbit_per_s": -1}, {"gbit_per_s": float("nan")}, {"latency_ms": float("inf")}])
def test_impossible_wires_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(LinkError, match=f"{next(iter(values))} must be 0 or a positive number"):
        LinkConfig(**values)


def test_names() -> None:
    assert LinkConfig().name == "unshaped"
    assert LinkConfig(1.0).name == "1 Gbit/s"
    assert LinkConfig(0.5, 20.0).name == "0.5 Gbit/s, 20 ms latency"


def test_a_worker_reads_before_it_imports_torch() -> None:
    code = "import sys, firsttoken.link.shaped; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
