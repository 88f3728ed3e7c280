"""One property for every format, counted: the project's error in one line, or the same result as the intact file."""

from __future__ import annotations

import json
import math
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firsttoken.study.errors import FirstTokenError
from fuzzing import mutators

SECONDS, BYTES = 5, 1 << 30  # what one reading may take of the processor and of memory
WAITS_S = 60  # and by the clock, which goes on while others have the processor


@dataclass(frozen=True)
class Format:
    """How files of one format are made in an empty folder, damaged, and read to something that can be compared.

    ``files`` are the names of those that are damaged. ``load`` and ``dump`` turn a file into the JSON that it holds and
    a damaged text of that into a file again, where it has any. ``legal`` is the rule by which another result is right:
    (intact, found) -> whether the format means such an edit to be possible. None: a sum seals the file.
    """

    name: str
    make: Callable[[Path], None]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    ways: tuple[mutators.Mutator, ...] = mutators.TEXT
    load: Callable[[bytes], Any] | None = None
    dump: Callable[[str, bytes], bytes] = lambda text, before: text.encode("utf-8", "surrogatepass")
    legal: Callable[[Any, Any], bool] | None = None
    same: Callable[[Any, Any], bool] = lambda intact, found: intact == found


@dataclass
class Report:
    """How many mutations came to what, and the first of each kind that should not be."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    slowest_s: float = 0.0

    def fault(self, kind: str, told: str) -> None:
        """Count one that should not be."""
        self.counts[kind] += 1
        self.faults.setdefault(f"{kind} {told.splitlines()[-1][:90] if told else ''}", told)


class Hang(BaseException):
    """A reading that takes too long; no reader's own handler catches it."""


def fuzz(one: Format, count: int, seed: int = 0, seconds: float = math.inf) -> Report:
    """Read ``count`` damaged files, or as many as ``seconds`` allow, once the intact one is made."""
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        intact = Path(scratch) / "intact"
        intact.mkdir()
        one.make(intact)
        expected = one.read(_copied(intact, Path(scratch) / "first"))
        until = time.monotonic() + seconds
        for number in range(count):
            if time.monotonic() > until:
                break
            dice = random.Random(f"{one.name} {seed} {number}")
            folder = _copied(intact, Path(scratch) / "damaged")
            told = _damage(one, folder, dice)
            _judge(one, folder, expected, f"{one.name} {seed} {number}: {told}", report)
    return report


def _damage(one: Format, folder: Path, dice: random.Random) -> str:
    path = folder / dice.choice(one.files)
    data, draw = path.read_bytes(), dice.random()
    if draw < 0.04:
        return f"{path.name}: {mutators.place(path, dice)}"
    if one.load and draw < 0.6:
        path.write_bytes(one.dump(mutators.tree(one.load(data), dice), data))
        return f"{path.name}: tree"
    way = dice.choice(one.ways)
    path.write_bytes(way(data, dice))
    return f"{path.name}: {way.__name__}"


def _judge(one: Format, folder: Path, expected: Any, told: str, report: Report) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        with _limited():
            found = one.read(folder)
    except FirstTokenError as error:
        line = str(error)
        report.counts["refused"] += 1
        if "\n" in line or len(line) > 1500 or not line.strip():
            report.fault("message", f"{told}: {line[:300]!r}")
    except Hang:
        report.fault("hang", told)
    except Exception:
        report.fault("raw", f"{told}\n{traceback.format_exc()[-1500:]}")
    else:
        if one.same(expected, found):
            report.counts["same"] += 1
        elif one.legal and one.legal(expected, found):
            report.counts["legal"] += 1
        else:
            report.fault("wrong", f"{told}: {_difference(expected, found)}")
    report.counts["read"] += 1
    report.slowest_s = max(report.slowest_s, time.monotonic() - started)
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 > BYTES:
        report.fault("memory", told)


def _difference(expected: Any, found: Any) -> str:
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a != b]
        return f"{str(pairs[0])[:300]}" if pairs else ""
    return f"{str(expected)[:200]} became {str(found)[:200]}"


def _copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(WAITS_S)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def told(reports: dict[str, Report]) -> str:
    """A table of the counts by format, and in full whatever should not be."""
    names = ("read", "refused", "same", "legal", "raw", "wrong", "hang", "memory", "message")
    lines = [f"{'format':<18}" + "".join(f"{name:>9}" for name in names) + f"{'slowest':>10}"]
    for name, report in reports.items():
        lines.append(
            f"{name:<18}" + "".join(f"{report.counts[key]:>9}" for key in names) + f"{report.slowest_s:>8.2f} s"
        )
    total = sum((report.counts for report in reports.values()), Counter())
    lines.append(f"{'all':<18}" + "".join(f"{total[key]:>9}" for key in names))
    return "\n".join([*lines, *(text for report in reports.values() for text in report.faults.values())])


def from_json(data: bytes) -> Any:
    """What a JSON file holds, for :func:`mutators.tree`."""
    return json.loads(data)
