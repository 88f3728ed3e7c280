"""The options of every command."""

import argparse
from collections.abc import Callable, Iterable

from firsttoken import __version__
from firsttoken.study import extensions
from firsttoken.study import option_values as values
from firsttoken.study.command_line import CommandLine

_WHAT = (
    "Five research reports on serving language models: their figures, their measurements and a server, on one machine."
)
_FIRST = "Begin with `firsttoken doctor` and `firsttoken run --only 01`. Each command has a --help of its own."


Command = Callable[[argparse.Namespace], int]

EXTENSIONS = extensions.commands()  # packages of their own: the library serves without them, and imports none


def parser(commands: Iterable[Command]) -> argparse.ArgumentParser:
    """Return the program's parser; the command that was chosen is ``command`` of what it parses."""
    functions, made = {function.__name__: function for function in commands}, dict[str, argparse.ArgumentParser]()
    parser = CommandLine(prog="firsttoken", description=_WHAT, epilog=_FIRST)
    parser.add_argument("--version", action="version", version=f"firsttoken {__version__}")
    added_to = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made[name] = added = added_to.add_parser(name, help=text, description=text)
        added.set_defaults(command=functions[name])
        return added

    for extension in EXTENSIONS:
        extension.add_options(command)

    description = "Download the pinned model and texts, or what a page of the site runs on, and check their hashes."
    added = command("fetch", description)
    added.add_argument(
        "names", nargs="*", metavar="ASSET", help="the assets to fetch, as --list names them (default: all)"
    )
    from_dir = "copy the wheels, and the files that env/brought.yaml lists, from this folder instead of downloading"
    added.add_argument("--from", dest="from_dir", type=values.folder, metavar="DIR", help=from_dir)
    added.add_argument("--list", action="store_true", help="list the assets, their sizes and what is missing, and stop")

    added = command("stage", "Write a model in stages, so that `firsttoken serve` answers before all of it is loaded.")
    added.add_argument("folder", type=values.folder, metavar="FOLDER", help="the folder to write")
    values.add_profile(added)
    values.add_setting(added)
    recipes = (
        "the adapters that repair the stages: ours, report or none (default: those that answer best by the profile)"
    )
    added.add_argument("--adapters", default="", metavar="NAME", help=recipes)
    added.set_defaults(make_plan=lambda options: None)

    for extension in EXTENSIONS:
        for name, add in getattr(extension, "MORE_OPTIONS", {}).items():
            add(made[name])
    return parser
