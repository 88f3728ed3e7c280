"""What the extras add to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from firsttoken.study import option_values
from firsttoken.study.profile import Profile
from firsttoken_extras.bitplanes.layouts import SPLITS
from firsttoken_extras.bitplanes.plan_spec import SPELLED

OK = 0


def assemble(options: argparse.Namespace) -> int:
    """Write the ordinary checkpoint that was staged."""
    from firsttoken_extras.bitplanes.assemble import assemble as write

    print(f"{write(options.folder, options.target)}: as stock from_pretrained reads it")
    return OK


COMMANDS = (assemble,)


def add_options(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add the commands of the extras, each by ``command``, which makes its parser."""
    added = command(
        "assemble", "Write a staged model back as one ordinary checkpoint, bit-identical to the one that was staged."
    )
    staged = "the folder that `firsttoken stage` wrote"
    added.add_argument("folder", type=option_values.folder, metavar="FOLDER", help=staged)
    added.add_argument("target", type=option_values.folder, metavar="TARGET", help="the new folder to write")


def add_stage_options(stage: argparse.ArgumentParser) -> None:
    """Let ``firsttoken stage`` write planes."""
    stage.add_argument(
        "--planes",
        default="",
        metavar="PLAN",
        help="split every weight into bits that come first and bits that come later, by a plan of the form"
        f" {SPELLED}, such as 'bits' or 'bits, 11:19 later, ends 8 bits'. A SPLIT is one of: {', '.join(SPLITS)}"
        " (default: whole layers come later instead)",
    )
    stage.set_defaults(make_plan=plan_of_planes)


MORE_OPTIONS = {"stage": add_stage_options}


def plan_of_planes(options: argparse.Namespace, profile: Profile) -> Callable[..., object] | None:
    """What makes the plan of ``--planes`` of the shapes of a model's tensors; None where the plan is the library's.

    Raises StageError for a plan that is none.
    """
    if not options.planes:
        return None
    from firsttoken_extras.bitplanes.plan_spec import PlanSpec
    from firsttoken_extras.bitplanes.plane_plan import by_planes

    plan_spec = PlanSpec.parse(options.planes)
    return lambda shapes: by_planes(shapes, plan_spec)
