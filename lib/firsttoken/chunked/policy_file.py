"""A scheduler in a file of the reader's own: one class with one method, as those of ``engine/schedulers``."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType

from firsttoken.chunked.patience import TooLong
from firsttoken.engine.schedulers.base import Scheduler
from firsttoken.study.errors import FirstTokenError, ProfileError


def read_scheduler(path: Path) -> type[Scheduler]:
    """The scheduler that ``path`` defines; what else it imports is not counted.

    Raises ProfileError for a file that is not there, does not import, or defines none or several that could run.
    """
    if not path.is_file():
        raise ProfileError(f"there is no policy file {path}; give a scheduler's name or a path")
    module = ModuleType(f"policy_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where a dataclass looks for what its annotations name
    with blamed(path):  # not by the importing machinery, which would leave its compiled copy beside the file
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    found = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Scheduler) and kind.__module__ == module.__name__
    ]
    whole = [kind for kind in found if not inspect.isabstract(kind)]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise ProfileError(f"{path}: defines {', '.join(kind.__name__ for kind in whole)}; one scheduler a file")
    missing = f"{found[0].__name__} has no method schedule" if found else "defines no scheduler"
    raise ProfileError(f"{path}: {missing}; write a subclass of firsttoken.engine.schedulers.base.Scheduler with one")


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
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        said = " ".join(str(error).split())
        # the engine asserts that a scheduler runs somebody as long as requests are open
        kind = "never finishes" if isinstance(error, AssertionError) and not lines else type(error).__name__
        raise ProfileError(f"{where}: {kind}: {said}; mend the policy") from error


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
