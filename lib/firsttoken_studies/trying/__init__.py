"""A policy of the reader's own against its siblings: one module a kind, the same draws for all, one table."""

from __future__ import annotations

import argparse
from importlib import import_module

from firsttoken.study.profile import check_used, load_profile

KINDS = {  # what `firsttoken try` takes, and the module that tries it
    "scheduler": "scheduler",
    "preemption": "replay",
    "victim": "replay",
    "resume": "replay",
    "transition": "transition",
    "placement": "placement",
    "layers": "layers",
}


def try_policy(options: argparse.Namespace) -> int:
    """Print the policy in a file beside those of its kind, on the same draws of what the profile says.

    Raises ProfileError, one line that names the file, for one that holds no such policy, and for what it may not do.
    """
    settings = dict(options.set)
    module = import_module(f"firsttoken_studies.trying.{KINDS[options.kind]}")
    profile = load_profile(options.profile, **settings)
    draws = range(profile.seed, profile.seed + options.draws)
    table = getattr(module, f"tried_{options.kind}")(options.file, profile, draws)
    check_used(settings, profile.used)
    options.answer |= {"kind": options.kind, "profile": profile.name, "setting": table.setting, "policies": table.rows}
    options.answer["yours"] = next(iter(table.rows))
    print(table.told())
    return 0


try_policy.__name__ = "try"  # which is Python's word
