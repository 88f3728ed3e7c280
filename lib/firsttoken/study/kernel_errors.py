"""In a notebook, a cell that lacks a name says why: the cell that failed before it, or one that has not run yet."""

from __future__ import annotations

from typing import Any

from firsttoken.study.progress import kernel


class _Causes:
    """Remembers the first error of a kernel's cells."""

    def __init__(self) -> None:
        self.said = ""

    def after(self, result: Any) -> None:
        """Called by IPython after each cell: behind the error of a missing name it prints what failed before, or how to
        run what has not run yet."""
        error = result.error_before_exec or result.error_in_exec
        if isinstance(error, NameError) and self.said:
            print(f"An earlier cell failed, and this one lacks what it defines. {self.said}")
        elif isinstance(error, NameError):
            print("If a cell above this one defines it, run that first: Run > Run All Above Selected Cell.")
        elif error is not None and not self.said:
            self.said = f"{type(error).__name__}: {error}"


def tell_causes() -> None:
    """From here on a cell that lacks a name ends with the error of the cell that failed before it, or with advice."""
    shell = kernel()
    if shell is not None and not hasattr(shell, "firsttoken_causes"):
        shell.firsttoken_causes = causes = _Causes()
        shell.events.register("post_run_cell", causes.after)
