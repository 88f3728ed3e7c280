"""The command line: each command imports what it needs, so that ``serve`` listens before torch is there."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from firsttoken.lean.importing import uncollected

with uncollected():
    from firsttoken.options import EXTENSIONS, parser
from firsttoken.study import option_values, paths, storage
from firsttoken.study.errors import AssetError, FirstTokenError
from firsttoken.study.machine import kernels_multiply
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import check_used, load_profile
from firsttoken.study.system.compiled import accelerator
from firsttoken.study.system.openmp import wait_briefly
from firsttoken.terminal import ended_as_interrupted, show_what_it_can, size_text

ANYWHERE = ("serve", "swarm", "prefix", "doctor")
"""Commands that work on folders which they are given; all others work on a clone's own files."""

OK, USAGE, INTERRUPTED, READER_GONE = 0, 2, 128 + signal.SIGINT, 128 + signal.SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    show_what_it_can()
    options = parser(COMMANDS).parse_args(arguments)
    try:
        accelerator()  # another word would be noticed in the middle of an answer
        if options.command.__name__ not in ANYWHERE:
            check_clone(f"`firsttoken {options.command.__name__}`")
        with storage.storing(paths.OUT), ended_as_interrupted(options.command.__name__):
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


def check_clone(what: str) -> None:
    """Raise AssetError where the package alone is installed, and ``what`` works on a clone's files."""
    if not paths.IS_CLONE:
        raise AssetError(
            f"{what} works on the files of a clone, and {paths.ROOT} is none: clone the project and run it there after"
            " `pip install -e .`, or set FIRSTTOKEN_ROOT to the clone"
        )


def fetch(options: argparse.Namespace) -> int:
    """Bring the pinned assets into the cache."""
    from firsttoken.assets.fetch import fetch, load_lock
    from firsttoken.assets.manual_downloads import bring, download, names

    lock = {asset.name: asset for asset in load_lock(npm=True)}
    asked = [name for name in options.names if name not in lock]
    if odd := next((name for name in asked if name not in names()), ""):
        raise AssetError(f"no asset is called {odd!r}; {unknown(odd, [*lock, *names()])}")
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
    download(asked, options.from_dir)
    if options.names or not asked:
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


def serve(options: argparse.Namespace) -> int:
    """Serve a model until Ctrl-C."""
    with uncollected():
        from firsttoken.service.launch import serve_forever
        from firsttoken.service.service_config import ServiceConfig, read_key

    if options.folder is None:
        check_clone("`firsttoken serve` without a FOLDER")
        from firsttoken.assets.gguf import PINNED, converted

        options.folder = converted(PINNED, hashed=False)
    given = {"folder": options.folder, "api_key": read_key(options.api_key_file)}
    serve_forever(option_values.configured(ServiceConfig, options, **given))
    return OK


def swarm(options: argparse.Namespace) -> int:
    """Serve blocks of a model, or use and list the servers that do."""
    wait_briefly(kernels_multiply())
    if options.action == "serve" and options.variant:
        from firsttoken.petals.actions import run
        from firsttoken.service.swarm_variants import with_variants

        act = partial(run, make_backend=with_variants(options.variant, options.model))
    else:
        from firsttoken.petals.actions import run as act

    act(options)
    return OK


def prefix(options: argparse.Namespace) -> int:
    """Store what models compute for texts, for services to take."""
    from firsttoken.service.prefix_actions import run

    run(options)
    return OK


COMMANDS = (*(one for extension in EXTENSIONS for one in extension.COMMANDS), fetch, stage, serve, prefix, swarm)


if __name__ == "__main__":
    sys.exit(main())
