"""The option that the extras add to the command line: ``firsttoken stage --planes``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from firsttoken_extras.bitplanes.layouts import SPLITS

COMMANDS = ()


def add_options(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add no command: the extras have none of their own."""


def add_stage_options(stage: argparse.ArgumentParser) -> None:
    """Add the option ``--planes`` to ``firsttoken stage``, by which it writes planes."""
    stage.add_argument(
        "--planes",
        default="",
        choices=tuple(SPLITS),
        metavar="SPLIT",
        help="split every weight into bits that come first and bits that come later, by one of:"
        f" {', '.join(SPLITS)} (default: whole layers come later instead)",
    )
    stage.set_defaults(make_plan=plan_of_planes)


MORE_OPTIONS = {"stage": add_stage_options}


def plan_of_planes(options: argparse.Namespace) -> Callable[..., object] | None:
    """Return a function that makes the plan of ``--planes`` of the shapes of a model's tensors; None where the plan is
    the library's."""
    if not options.planes:
        return None
    from firsttoken_extras.bitplanes.plane_plan import by_planes

    return partial(by_planes, split=options.planes)
