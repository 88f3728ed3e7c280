"""A policy in a file of the reader's own: one class or function of its kind, watched while it decides.

A decision that never returns is ended: a loop in somebody's code, which nothing in that code would end.
"""

import ctypes
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Self

from firsttoken.study.errors import FirstTokenError, ProfileError

LONGEST_S = 20.0  # of one decision, which takes a thousandth of a second


class TooLong(BaseException):
    """Raised in the decision itself; no ``except Exception`` there holds it up."""


class Decisions:
    """Says since when a decision is being taken, ``None`` between two."""

    def __init__(self) -> None:
        self.since_s: float | None = None

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Around a decision; one within another is a part of it."""
        before, self.since_s = self.since_s, time.monotonic()
        try:
            yield
        finally:
            self.since_s = before


@contextmanager
def bounded(decisions: Decisions, whose: object) -> Iterator[None]:
    """Raises ProfileError, naming ``whose`` decision in the block took more than ``LONGEST_S``, while it is in Python.

    From a thread, not by a signal: a process in the background may ignore SIGINT, and not every system has SIGALRM.
    """
    finished, own_thread = threading.Event(), ctypes.c_ulong(threading.get_ident())

    def watch() -> None:
        while not finished.wait(LONGEST_S / 10):
            since_s = decisions.since_s
            if since_s is not None and time.monotonic() - since_s > LONGEST_S:
                # again with each look: where it meets a callback of the collector, Python drops it
                ctypes.pythonapi.PyThreadState_SetAsyncExc(own_thread, ctypes.py_object(TooLong))

    thread = threading.Thread(target=watch, name="patience", daemon=True)
    thread.start()
    try:
        yield
    except TooLong:
        raise ProfileError(f"{whose}: never finishes: a decision takes more than {LONGEST_S:g} s; mend it") from None
    finally:
        finished.set()
        thread.join()


Judge = Callable[..., str]  # of an answer, and of all that was asked: what is wrong with it, "" for nothing


@dataclass(frozen=True)
class PolicyKind:
    """A kind of policy file by its ``label``: it defines one subclass of ``base`` or, where that is None, one function;
    those with an underscore are helpers. ``mend`` says how to write one, ``judges`` check the answers of each method
    ("": of the function)."""

    label: str
    base: type | None
    mend: str
    judges: Mapping[str, Judge] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyFile:
    """A ``policy`` in ``file``, a class or function of ``kind``; ``decisions`` know when one is being taken."""

    file: Path
    kind: PolicyKind
    policy: Any
    decisions: Decisions

    @classmethod
    def read(cls, file: Path, kind: PolicyKind) -> Self:
        """Raises ProfileError for a file that is not there, does not import, or defines no policy or several that could
        run; what else it imports is not counted."""
        file, decisions = file.expanduser(), Decisions()
        if not file.is_file():
            fault = f"{file} is a folder, no policy file" if file.is_dir() else f"there is no policy file {file}"
            raise ProfileError(f"{fault}; give a {kind.label}'s name or a path")
        module = ModuleType(f"policy_{file.stem}")
        module.__file__ = str(file)
        sys.modules[module.__name__] = module  # where a dataclass looks for what its annotations name
        # not by the importing machinery, which would leave its compiled copy beside the file
        with bounded(decisions, file), blamed(file), decisions.deciding():
            exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
        return cls(file, kind, _only_policy(module, file, kind), decisions)

    def watched(self) -> Any:
        """The policy, with every decision bounded in time and its answer looked at."""
        if self.kind.base is None:
            return self._judged(self.policy, self.kind.judges[""])
        judges = {"__init__": lambda *_: ""} | dict(self.kind.judges)
        methods = {name: self._judged(getattr(self.policy, name), judge) for name, judge in judges.items()}
        return type(self.policy.__name__, (self.policy,), methods)

    def _judged(self, function: Callable[..., Any], judge: Judge) -> Callable[..., Any]:
        @wraps(function)
        def judged(*given: Any, **named: Any) -> Any:
            with blamed(self.file), self.decisions.deciding():
                answer = function(*given, **named)
            if wrong := judge(answer, *given):
                raise ProfileError(f"{self.file}: {wrong}")
            return answer

        return judged

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Around all that runs it: raises ProfileError, one line that names the file, for what it does wrong, and where
        a decision never ends."""
        try:
            with bounded(self.decisions, self.file), blamed(self.file):
                yield
        except FirstTokenError as error:
            if str(self.file) in str(error):
                raise
            raise ProfileError(f"{self.file}: {error}") from error


def _only_policy(module: ModuleType, file: Path, kind: PolicyKind) -> Any:
    defined = {
        name: thing for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__
    }
    if kind.base is None:
        candidates = {name: thing for name, thing in defined.items() if inspect.isfunction(thing) and name[0] != "_"}
    else:
        candidates = {
            name: thing for name, thing in defined.items() if inspect.isclass(thing) and issubclass(thing, kind.base)
        }
    concrete = {name: thing for name, thing in candidates.items() if not inspect.isabstract(thing)}
    if len(concrete) == 1:
        return next(iter(concrete.values()))
    if concrete:
        raise ProfileError(f"{file}: defines {', '.join(concrete)}; one {kind.label} a file")
    missing = f"defines no {kind.label}"
    for name, thing in candidates.items():
        missing = f"{name} has no method {', '.join(sorted(thing.__abstractmethods__))}"
    raise ProfileError(f"{file}: {missing}; {kind.mend}")


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Any error in the block is that of ``path``: raises ProfileError, with the line where it came from one of them."""
    try:
        with _interruptions() as came:
            yield
    except (FirstTokenError, TooLong):  # the latter is said by who bounds a decision
        raise
    except BaseException as error:  # SystemExit too: a file does not end the program
        if came and isinstance(error, KeyboardInterrupt):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        location = f"{path}, line {lines[-1]}" if lines else str(path)
        reason = " ".join(str(error).split())
        # the engine asserts that a scheduler runs somebody as long as requests are open
        kind = "never finishes" if isinstance(error, AssertionError) and not lines else type(error).__name__
        raise ProfileError(f"{location}: {kind}: {reason}; mend the policy") from error


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """The signals of Ctrl-C that came during the block: a reader sends them, and a file that raises KeyboardInterrupt
    does not. Only the main thread is interrupted by them."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield came
        return

    def noted(number: int, frame: FrameType | None) -> None:
        came.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, noted)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
