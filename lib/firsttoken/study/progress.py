"""Shows in a notebook a line that says how long something has run: progress bars are drawn in terminals only."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

UNSEEN = "FIRSTTOKEN_UNSEEN"  # set where nobody looks at a notebook while it runs, as under `firsttoken run`
QUIET_S, EVERY_S = 5.0, 1.0  # what takes less is not told of; between two updates of the line


def kernel() -> Any:
    """The shell of the Jupyter kernel that this process is; None elsewhere."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell if getattr(shell, "kernel", None) is not None else None


@contextmanager
def running(what: str, usual_s: float | None = None) -> Iterator[None]:
    """Around something long: below the cell stands how many seconds ``what`` has run, of about ``usual_s`` if that is
    known. The line goes when the block ends."""
    if kernel() is None or os.environ.get(UNSEEN):
        yield
        return
    over, line = threading.Event(), []
    thread = threading.Thread(target=_tell, args=(what, usual_s, over, line), daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for handle in line:
            handle.update({"text/plain": ""}, raw=True)


def _tell(what: str, usual_s: float | None, over: threading.Event, line: list[Any]) -> None:
    from IPython.display import display

    begun, usual = time.monotonic(), f" of about {usual_s:.0f} s" if usual_s else ""
    wait = QUIET_S
    while not over.wait(wait):
        text = {"text/plain": f"{what} has run for {time.monotonic() - begun:.0f} s{usual}"}
        if line:
            line[0].update(text, raw=True)
        else:
            line.append(display(text, raw=True, display_id=True))
        wait = EVERY_S
