"""The code that a result hangs on: the files of this library that an experiment imports, directly or through others.

C++ that lies beside an imported file is compiled by it, and counts as well.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from functools import lru_cache
from pathlib import Path

from firsttoken.study import paths

_LIBRARY = Path(__file__).parents[2]  # the folder that holds the package
_IMPORTS = re.compile(r"^[ \t]*(?:from (firsttoken[\w.]*) import ([\w, ]+|\([^)]*\))|import (firsttoken[\w.]*))", re.M)


def digest(module: str) -> str:
    """The sha256 over the name and content of every file of the library that ``module`` imports, its own included."""
    lines = [f"{name} {_blob(_LIBRARY / name)}" for name in imported(module)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def changed(module: str, revision: str) -> list[str] | None:
    """The files that ``module`` imports, sorted, which at the commit ``revision`` were absent or another; None where
    git does not know that commit, as in a copy without history."""
    then = _tree(revision)
    if then is None:
        return None
    prefix = _LIBRARY.relative_to(paths.ROOT).as_posix() if _LIBRARY.is_relative_to(paths.ROOT) else "lib"
    return [name for name in imported(module) if then.get(f"{prefix}/{name}") != _blob(_LIBRARY / name)]


@lru_cache(maxsize=8)  # a notebook asks for one or two experiments, several times
def imported(module: str) -> tuple[str, ...]:
    """The files of ``module`` and of all that it imports of this library, relative to its folder, sorted. What a
    function imports when it is called counts as well."""
    found, left = dict[str, Path](), [module]
    while left:
        name = left.pop()
        path = _file(name)
        if path is None or name in found:
            continue
        found[name] = path
        left += [name.rpartition(".")[0]] * ("." in name)
        for source, names, plain in _IMPORTS.findall(path.read_text(encoding="utf-8")):
            left += [source or plain, *(f"{source}.{part}" for part in re.findall(r"\w+", names) if source)]
    native = {file for path in found.values() for file in path.parent.glob("*.cpp")}
    return tuple(sorted(path.relative_to(_LIBRARY).as_posix() for path in {*found.values(), *native}))


def _file(module: str) -> Path | None:
    """The file of a module; None for the name of something else, such as a function."""
    place = _LIBRARY.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _blob(path: Path) -> str:
    """The name that git gives to the content of a file."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@lru_cache(maxsize=8)
def _tree(revision: str) -> dict[str, str] | None:
    """The library's files at a commit, each with git's name for its content; None for a commit that is not here."""
    command = ["git", "-C", str(paths.ROOT), "ls-tree", "-r", revision.removesuffix("-dirty"), "lib"]
    try:
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    rows = (line.split("\t", 1) for line in told.splitlines())
    return {name: about.split()[2] for about, name in rows}
