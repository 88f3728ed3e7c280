"""What may stand behind an option of the command line, checked before anything starts, and configurations whose fields
are options."""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config")


def setting(text: str) -> tuple[str, Any]:
    """``key=value`` with the value read as YAML; nothing is the empty text, as a shell hands it on."""
    from firsttoken.study.parsing.yaml_text import parse_yaml  # a service reads its configuration without it

    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value, such as seed=1")
    try:
        return key, parse_yaml(value) if value else ""
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value[:80]!r} is not a YAML value: {error}") from error


def folder(text: str) -> Path:
    """A folder that has a name; whether it is there, who uses it asks."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError("the name of a folder is empty; name one")
    return Path(text)


def named_folder(text: str) -> tuple[str, Path]:
    """Parse a name and a folder, NAME=DIR."""
    name, equals, path = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no NAME=DIR, such as qa=adapters/qa")
    return name, folder(path)


def owner(text: str) -> str:
    """A name of up to 64 letters, digits, dots and dashes; without any, everybody."""
    if not re.fullmatch(r"[\w.-]{0,64}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no name; take up to 64 letters, digits, dots, dashes")
    return text


def rate(text: str) -> float:
    """A rate in Gbit/s: 0 or more, and finite."""
    if not 0 <= (rate := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; give Gbit/s, such as 0.1, or 0 for no limit")
    return rate


def seconds(text: str) -> float:
    """A time: 0 s or more, and finite."""
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds, 0 or more")
    return value


def above_zero(most: float) -> Callable[[str], float]:
    """A number above 0, ``most`` at most."""

    def number(text: str) -> float:
        if not 0 < (value := float(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is out of range; give a number above 0 and at most {most:g}")
        return value

    return number


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number within both ends."""

    def number(text: str) -> int:
        if not (text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is out of range; give a whole number from {least} to {most}")
        return int(text)

    return number


def host(text: str) -> str:
    """Check an address to listen on, which must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "the address is empty; name one, such as 127.0.0.1, or 0.0.0.0 for all of this machine"
        )
    return text


def add_profile(parser: argparse.ArgumentParser, default: str = "quick") -> None:
    """Add the option that says how large a study is."""
    from firsttoken.study.profile import profile_names  # as above

    names = ", ".join(profile_names())
    text = f"the size of the study, a file of env/profiles: {names} (default: {default})"
    parser.add_argument("--profile", default=default, metavar="NAME", help=text)


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Add the option that changes single settings of the profile."""
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting of the profile, such as seed=1 or machine.repeats=3; may be repeated",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option of commands whose answer a program may read."""
    parser.add_argument("--json", action="store_true", help="print the answer as one line of JSON, and nothing else")


def option(
    default: Any, kind: Callable[[str], Any] = str, metavar: str | None = None, *, group: str = "", flag: str = ""
) -> Any:
    """A field of a configuration that is an option of the command line, too, under its own name or as ``flag``.

    ``kind`` reads the text behind it. Where the default is False it is a switch, and where it is () it may be repeated.
    The options of a ``group`` stand below that heading.
    """
    metadata = {"kind": kind, "metavar": metavar, "group": group, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


def add_fields(parser: argparse.ArgumentParser, config: type, texts: Mapping[str, str]) -> None:
    """Add an option for each field of the dataclass ``config`` that :func:`option` has made; ``texts`` explain them."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for entry in dataclasses.fields(config):
        if not (metadata := entry.metadata):
            continue
        if metadata["group"] not in groups:
            groups[metadata["group"]] = parser.add_argument_group(metadata["group"])
        settings = {"dest": entry.name, "default": entry.default, "help": texts[entry.name]}
        if entry.default is False:
            settings |= {"action": "store_true"}
        else:
            settings |= {"type": metadata["kind"], "metavar": metadata["metavar"]}
        if entry.default == ():
            settings |= {"action": "append", "default": []}
        groups[metadata["group"]].add_argument(metadata["flag"] or f"--{entry.name.replace('_', '-')}", **settings)


def configured(config: type[Config], options: argparse.Namespace, **more: Any) -> Config:
    """The dataclass ``config`` with what :func:`add_fields` had parsed, and with ``more``. Raises as it does."""
    given = {entry.name: getattr(options, entry.name) for entry in dataclasses.fields(config) if entry.metadata}
    return config(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}, **more)
