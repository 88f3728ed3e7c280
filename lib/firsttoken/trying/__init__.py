"""A policy of the reader's own against its siblings: one module a kind, the same draws for all, one table."""

from __future__ import annotations

from importlib import import_module

from firsttoken.study.profile import Profile
from firsttoken.trying.table import Tried

KINDS = {  # what `firsttoken try` takes, and the module that tries it
    "scheduler": "scheduler",
    "preemption": "replay",
    "victim": "replay",
    "transition": "transition",
    "placement": "placement",
    "layers": "layers",
}


def tried(kind: str, file: str, profile: Profile, draws: int) -> Tried:
    """The policy in ``file`` beside those of its ``kind`` on ``draws`` draws of what ``profile`` says.

    Raises ProfileError, one line that names the file, for one that holds no such policy, and for what it may not do.
    """
    module = import_module(f"firsttoken.trying.{KINDS[kind]}")
    return getattr(module, f"tried_{kind}")(file, profile, range(profile.seed, profile.seed + draws))
