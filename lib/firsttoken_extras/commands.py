"""What the extras add to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from firsttoken.study import option_values
from firsttoken.study.errors import StageError
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
        f" {SPELLED}, such as 'bits' or 'bits, 11:19 later, ends 8 bits'. A SPLIT is one of: {', '.join(SPLITS)}. auto"
        " measures which plan is best (default: whole layers come later instead)",
    )
    share, percent = option_values.above_zero(1.0), option_values.above_zero(1000.0)
    least = "with --planes auto, the most bytes of the first stage as a share of all, such as 0.36"
    stage.add_argument("--budget", type=share, metavar="SHARE", help=least)
    lost = "with --planes auto, the most by which the first stage may raise perplexity, in percent, such as 5"
    stage.add_argument("--most-lost", type=percent, metavar="PERCENT", help=lost)
    stage.set_defaults(make_plan=plan_of_planes)


MORE_OPTIONS = {"stage": add_stage_options}


def plan_of_planes(options: argparse.Namespace, profile: Profile) -> Callable[..., object] | None:
    """What makes the plan of ``--planes`` of the shapes of a model's tensors; None where the plan is the library's.

    Raises StageError for a plan that is none, and where measuring has nothing to go by.
    """
    planes = options.planes
    if planes == "auto":
        planes = measured_plan(profile, options.budget, options.most_lost)
    elif options.budget is not None or options.most_lost is not None:
        raise StageError("--budget and --most-lost choose a plan: add --planes auto, or leave them out")
    if not planes:
        return None
    from firsttoken_extras.bitplanes.plan_spec import PlanSpec
    from firsttoken_extras.bitplanes.plane_plan import by_planes

    plan_spec = PlanSpec.parse(planes)
    return lambda shapes: by_planes(shapes, plan_spec)


def measured_plan(profile: Profile, budget: float | None, most_lost: float | None) -> str:
    """Return the plan that ``--planes auto`` chooses; what it measures is printed. Raises StageError."""
    from firsttoken_extras.bitplanes import planner

    if budget is None and most_lost is None:
        raise StageError("--planes auto needs --budget SHARE, such as 0.36, or --most-lost PERCENT, such as 5")
    text, found = planner.measured(profile)
    for one in planner.worth_it(found):
        print(
            f"{one.plan_spec}: {one.first_share:.3f} of the bytes first, perplexity {one.lost_pct:+.1f} % by its parts"
        )
    chosen = planner.choose(found, text.lost_pct, budget, most_lost)
    print(f"chosen: {chosen.plan_spec}, perplexity {chosen.lost_pct:+.1f} % as measured")
    return str(chosen.plan_spec)
