"""How far something long has come: a bar on a terminal, plain lines in a log, and in a notebook one line that goes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

Item = TypeVar("Item")
UNSEEN = "FIRSTTOKEN_UNSEEN"  # set where nobody looks at a notebook while it runs, as under `firsttoken run`
NOTEBOOK = "JPY_PARENT_PID"  # Jupyter sets it in a kernel, whose children would write into the cell
QUIET_S, EVERY_S = 5.0, 1.0  # what takes less is not told of; between two updates of the line
START_S, LINE_S = 1.0, 30.0  # until the first line of a log: what fails at once ends with its error alone; between two


def track(
    items: Iterable[Item] | None = None,
    *,
    desc: str,
    total: int | None = None,
    unit: str = "",
    initial: int = 0,
    leave: bool = True,
    delay: float = 0.0,
) -> tqdm[Item] | Lines[Item]:
    """Return ``items``, or a count up to ``total`` for ``update``, that shows how far it has come: by tqdm's bar on a
    terminal, by :class:`Lines` elsewhere. The unit "B" is bytes; nothing is shown in the first ``delay`` seconds."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        label = {"desc": desc, "total": total, "unit": unit or "it", "unit_scale": unit == "B"}
        return tqdm(items, initial=initial, leave=leave, delay=delay, **label)
    return Lines(items, desc, total, unit, initial, leave, delay)


class Lines(AbstractContextManager["Lines[Item]"], Generic[Item]):
    """Progress in plain lines on standard error, for logs: one after a second, one every half minute, and one at the
    end of what took longer than five seconds. What does not ``leave`` has those of the half minutes alone.

    In a notebook, and in what a notebook starts, nothing is written.
    """

    def __init__(
        self,
        items: Iterable[Item] | None,
        desc: str,
        total: int | None,
        unit: str,
        initial: int,
        leave: bool,
        delay: float,
    ) -> None:
        self._items, self._desc, self._unit, self._postfix = items, desc, unit, ""
        self._total = len(items) if total is None and hasattr(items, "__len__") else total
        self.n = self._initial = initial
        self._begun = time.monotonic()
        self._shown = not (kernel() or UNSEEN in os.environ or NOTEBOOK in os.environ)
        self._leaves_line = leave and self._shown
        self._due = self._begun + LINE_S
        self._first = threading.Timer(max(START_S, delay), lambda: self._write(self._counted()))
        self._first.daemon = True
        if self._leaves_line:
            self._first.start()

    def __iter__(self) -> Iterator[Item]:
        with self:
            for item in self._items or ():
                yield item
                self.update()

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        """Count ``n`` more."""
        self.n += n
        self._show_due()

    def set_postfix_str(self, text: str) -> None:
        """Say what is being done at the moment."""
        self._postfix = text
        self._show_due()

    def close(self) -> None:
        """End the count, with a line where it took long."""
        took_s = time.monotonic() - self._begun
        self._first.cancel()
        if self._leaves_line and took_s >= QUIET_S:
            self._write(f"{self._counted()} in {span(took_s)}")
        self._shown = self._leaves_line = False

    def _show_due(self) -> None:
        now = time.monotonic()
        if not self._shown or now < self._due:
            return
        self._due = now + LINE_S
        done = self.n - self._initial
        remaining_text = (
            f", {span((now - self._begun) / done * (self._total - self.n))} left" if done and self._total else ""
        )
        self._write(self._counted() + remaining_text + f" ({self._postfix})" * bool(self._postfix))

    def _counted(self) -> str:
        if self._unit == "B":
            return " of ".join(f"{n / 1e6:,.1f}" for n in (self.n, self._total) if n is not None) + " MB"
        numbers = " of ".join(f"{n:,}" for n in (self.n, self._total) if n is not None)
        plural = "" if self._total == 1 else "es" if self._unit.endswith("ch") else "s"
        return f"{numbers} {self._unit}{plural}" if self._unit else numbers

    def _write(self, text: str) -> None:
        print("firsttoken", self._desc, text, sep=": ", file=sys.stderr, flush=True)


Bar: TypeAlias = "tqdm[Any] | Lines[Any]"


def span(seconds: float) -> str:
    """Return seconds as a reader is told of them."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def kernel() -> Any:
    """The shell of the Jupyter kernel that this process is; None elsewhere."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell if getattr(shell, "kernel", None) is not None else None


@contextmanager
def running(activity: str, usual_s: float | None = None) -> Iterator[None]:
    """Around something long: below the cell stands how many seconds ``activity`` has run, of about ``usual_s`` if
    that is known. The line goes when the block ends."""
    if kernel() is None or os.environ.get(UNSEEN):
        yield
        return
    finished, line = threading.Event(), []
    thread = threading.Thread(
        target=_show_seconds, args=(activity, usual_s, finished, line), daemon=True, name="progress"
    )
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
        for handle in line:
            handle.update({"text/plain": ""}, raw=True)


def _show_seconds(activity: str, usual_s: float | None, finished: threading.Event, line: list[Any]) -> None:
    from IPython.display import display

    begun, usual = time.monotonic(), f" of about {usual_s:.0f} s" if usual_s else ""
    wait = QUIET_S
    while not finished.wait(wait):
        text = {"text/plain": f"{activity} has run for {time.monotonic() - begun:.0f} s{usual}"}
        if line:
            line[0].update(text, raw=True)
        else:
            line.append(display(text, raw=True, display_id=True))
        wait = EVERY_S
