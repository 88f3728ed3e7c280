"""The code that a result hangs on: the functions of this library that an experiment imports, directly or through
others.

A function that is moved to another file is the same function, and so is one whose docstring or comments are worded
anew. C++ that lies beside an imported file is compiled by it, and counts as well, each file as one function.
"""

import ast
import hashlib
import json
import re
import subprocess
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path

from firsttoken.study import paths
from firsttoken.study.files import write_text

_LIBRARY = Path(__file__).parents[2]  # the folder that holds the packages
_IMPORTS = re.compile(r"^[ \t]*(?:from (firsttoken[\w.]*) import ([\w, ]+|\([^)]*\))|import (firsttoken[\w.]*))", re.M)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def digest(module: str) -> str:
    """The sha256 over all functions that ``module`` imports, its own included."""
    return hashlib.sha256("\n".join(sorted(functions(module))).encode()).hexdigest()


def changed(module: str, revision: str) -> int | None:
    """How many of ``functions(module)`` the library did not hold at the commit ``revision``; None where git does not
    know that commit, as in a copy without history."""
    commit = revision.removesuffix("-dirty")
    then = _library_at(commit) if re.fullmatch("[0-9a-f]{7,64}", commit) else None
    return None if then is None else len(functions(module) - then)


@lru_cache(maxsize=8)  # a notebook asks for one or two experiments, several times
def functions(module: str) -> frozenset[str]:
    """A digest of each function, method, and statement outside of functions, in what ``module`` imports."""
    files = (_LIBRARY / name for name in imported(module))
    return frozenset(one for file in files for one in _pieces(file.name, file.read_text(encoding="utf-8")))


@lru_cache(maxsize=8)
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


def _pieces(name: str, source: str) -> Iterator[str]:
    """A digest of each function and of each statement outside of functions; of a class, those of its body."""
    if not name.endswith(".py"):
        yield hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        return
    lines = source.splitlines()
    left: list[ast.stmt] = list(ast.parse(source).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.ClassDef):
            left += node.body
            yield _said(lines, node.lineno, node.body[0].lineno - 1, set())
        elif not (isinstance(node, (ast.Import, ast.ImportFrom)) or _is_text(node)):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            yield _said(lines, first, node.end_lineno or first, _unsaid(node))


def _unsaid(node: ast.stmt) -> set[int]:
    """The lines of the docstrings and imports within ``node``: they say where a thing is, not what it does."""
    within = (one for one in ast.walk(node) if isinstance(one, ast.stmt))
    texts = {one.body[0] for one in ast.walk(node) if isinstance(one, _FUNCTIONS) and _is_text(one.body[0])}
    dropped = (one for one in within if isinstance(one, (ast.Import, ast.ImportFrom)) or one in texts)
    return {line for one in dropped for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _said(lines: list[str], first: int, last: int, without: set[int]) -> str:
    """A digest of lines ``first`` to ``last``, counted from 1, without blank lines, comments and ``without``."""
    numbers = (number for number in range(first, last + 1) if number not in without)
    said = (line for number in numbers if (line := lines[number - 1].strip()) and not line.startswith("#"))
    return hashlib.sha1("\n".join(said).encode(), usedforsecurity=False).hexdigest()


@lru_cache(maxsize=8)
def _library_at(revision: str) -> frozenset[str] | None:
    """The digests of all functions at a commit, kept in the cache; None for a commit that is not here.

    Reading the 600 files of a commit takes about two seconds, which a notebook with several records would feel.
    """
    kept = paths.CACHE / "code" / f"{revision}.json"
    if kept.is_file():
        return frozenset(json.loads(kept.read_text(encoding="utf-8")))
    try:
        rows = [line.split("\t", 1) for line in git("ls-tree", "-r", revision, "lib").decode().splitlines()]
        wanted = {name: about.split()[2] for about, name in rows if name.endswith((".py", ".cpp"))}
        texts = dict(zip(wanted, blobs(wanted.values()), strict=True))
    except (OSError, subprocess.CalledProcessError):
        return None
    found = {piece for name, text in texts.items() for piece in _pieces(name, text.decode())}
    write_text(kept, json.dumps(sorted(found)))
    return frozenset(found)


def git(*arguments: str, given: str = "") -> bytes:
    """What git says of this repository. Raises OSError where there is no git, and CalledProcessError where it fails."""
    command = ["git", "-C", str(paths.ROOT), *arguments]
    return subprocess.run(command, input=given.encode(), check=True, capture_output=True).stdout


def blobs(names: Collection[str]) -> Iterator[bytes]:
    """The contents of the objects that git knows by ``names``, in their order. Raises as :func:`git`."""
    told, at = git("cat-file", "--batch", given="\n".join(names)), 0
    for _ in names:
        line = told.index(b"\n", at)
        size = int(told[at:line].split()[2])
        yield told[line + 1 : line + 1 + size]
        at = line + size + 2
