"""What a command has around it: its terminal, the text that it shows there, and the signals that end it."""

import io
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from firsttoken.study import paths
from firsttoken.study.errors import AssetError


def check_clone(subject: str) -> None:
    """Raise AssetError where the package alone is installed, and ``subject`` works on a clone's files."""
    if not paths.IS_CLONE:
        raise AssetError(
            f"{subject} works on the files of a clone, and {paths.ROOT} is none: clone the project and run it there "
            "after `pip install -e .`, or set FIRSTTOKEN_ROOT to the clone"
        )


def show_what_it_can() -> None:
    """A terminal that lacks a character shows that it is missing, and the command goes on."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """SIGTERM, by which batch systems end a job, is as Ctrl-C during the block, so that nothing half-written stays.

    A second signal is not heard while the first one is answered: what is half-written is being taken away. A shell that
    started the command in its background has made it deaf to Ctrl-C, and not to this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not callable(signal.getsignal(signal.SIGINT)):
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def answering(as_json: bool) -> Iterator[dict[str, Any]]:
    """Yield what the block puts its answer into. Where the reader is a program, that is all that standard output has:
    it comes in one line once the block has ended well, and what the block prints for people is dropped."""
    from firsttoken.study.canonical_json import line

    content: dict[str, Any] = {}
    if not as_json:
        yield content
        return
    with redirect_stdout(io.StringIO()):
        yield content
    print(line(content))


def size_text(value: int | None) -> str:
    """Bytes as a reader is told of them."""
    if value is None:
        return "none"
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
