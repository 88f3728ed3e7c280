"""The command line: each command imports what it needs, so that ``serve`` listens before torch is there."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from firsttoken.study.system.importing import without_collector

with without_collector():
    from firsttoken.options import EXTENSIONS, parser
from firsttoken.study import paths, storage
from firsttoken.study.errors import AssetError, FirstTokenError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import check_used, load_profile
from firsttoken.study.system.compiled import accelerator_name
from firsttoken.terminal import answering, check_clone, ended_as_interrupted, show_what_it_can, size_text

ANYWHERE = [name for extension in EXTENSIONS for name in getattr(extension, "ANYWHERE", ())]
"""Commands that work on folders which they are given; all others work on a clone's own files."""
OWN_ENDS = [name for extension in EXTENSIONS for name in getattr(extension, "OWN_ENDS", ())]
"""Commands that answer signals themselves."""

OK, USAGE, INTERRUPTED, READER_GONE = 0, 2, 128 + signal.SIGINT, 128 + signal.SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    show_what_it_can()
    options = parser(COMMANDS).parse_args(arguments)
    name = options.command.__name__
    try:
        accelerator_name()  # another word would be noticed in the middle of an answer
        if name not in ANYWHERE:
            check_clone(f"`firsttoken {name}`")
        interruption = nullcontext() if name in OWN_ENDS else ended_as_interrupted()
        with storage.storing(paths.OUT), interruption, answering(getattr(options, "json", False)) as options.answer:
            return options.command(options)
    except FirstTokenError as error:
        print(f"firsttoken: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\nfirsttoken: interrupted; nothing half-written was left", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `firsttoken doctor | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to say goes nowhere
        return READER_GONE


def fetch(options: argparse.Namespace) -> int:
    """Bring the pinned assets into the cache."""
    from firsttoken.assets.fetch import fetch
    from firsttoken.assets.lock import load_lock
    from firsttoken.assets.manual_downloads import bring, download, names

    lock = {asset.name: asset for asset in load_lock()}
    extra_names = [name for name in options.names if name not in lock]
    if unknown_name := next((name for name in extra_names if name not in names()), ""):
        raise AssetError(f"no asset is called {unknown_name!r}; {unknown(unknown_name, [*lock, *names()])}")
    options.names = [name for name in options.names if name in lock]
    if options.list:
        for asset in [lock[name] for name in options.names or lock]:
            lacks = len(asset.missing())
            state = f"missing {lacks} of {len(asset.members)} files" if lacks else "present"
            print(f"{asset.name}: {asset.pin}, {asset.bytes / 1e6:.0f} MB to download, {asset.licence}; {state}")
        print(f"by name alone, from the addresses in env/brought.yaml: {', '.join(names())}")
        return OK
    for name in bring(options.from_dir) if options.from_dir else ():
        print(f"{name}: brought")
    download(extra_names, options.from_dir)
    if options.names or not extra_names:
        fetch(options.names or None, from_dir=options.from_dir)
    return OK


def stage(options: argparse.Namespace) -> int:
    """Write a staged checkpoint of the profile's model."""
    from firsttoken.progressiveserve.staging import stage_model

    profile = load_profile(options.profile, **dict(options.set))
    make_plan = options.make_plan(options)
    manifest = stage_model(profile, options.folder, options.adapters, make_plan)
    check_used(dict(options.set), profile.used)
    for number, brought in enumerate(manifest.stages, start=1):
        healed = f", adapter {size_text(brought.adapter.bytes)}" if brought.adapter else ""
        print(f"stage {number} ({brought.name}): {len(brought.parts)} files, {size_text(brought.bytes)}{healed}")
    print(f"{options.folder}: serve it with `firsttoken serve {options.folder}`")
    return OK


COMMANDS = (*(command for extension in EXTENSIONS for command in extension.COMMANDS), fetch, stage)


if __name__ == "__main__":
    sys.exit(main())
