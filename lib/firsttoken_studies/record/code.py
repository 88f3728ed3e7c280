"""The code that a result hangs on: the functions of this library that an experiment imports, directly or through
others.

Two functions are the same where they differ in nothing but the names of locals, docstrings, comments, layout,
annotations and the file that holds them. So are two whose parameters were given new names, where no call passed these
by keyword. C++ that lies beside an imported file is compiled by it with its headers, and counts as well, each file as
one function.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from firsttoken.study import paths
from firsttoken.study.extensions import registered
from firsttoken.study.files import write_text

FORM = "locals"  # begins each digest: one without it is of functions as texts, and cannot be held beside these
_LIBRARY = Path(__file__).parents[2]  # the folder that holds the packages
_IMPORTS = re.compile(r"^[ \t]*(?:from (firsttoken[\w.]*) import ([\w, ]+|\([^)]*\))|import (firsttoken[\w.]*))", re.M)
_ASKED = re.compile(r'\bextension\("([A-Z_]+)"')  # what packages register under a kind, by the kind
_NATIVE = (".cpp", ".h")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NAMES = {  # fields that name variables
    *(("ExceptHandler", "name"), ("Nonlocal", "names")),
    *(("MatchAs", "name"), ("MatchStar", "name"), ("MatchMapping", "rest")),
}
_READS_NAMES = {"locals", "vars", "eval", "exec"}  # what a function computes by them may depend on its names


class Code(NamedTuple):
    """Functions, each as the digest of its normal form before the names of its parameters, and the names by which calls
    pass arguments."""

    functions: frozenset[str]
    keywords: frozenset[str]


def digest(module: str) -> str:
    """The sha256 over all functions that ``module`` imports, its own included, behind the name of the form."""
    return f"{FORM}-{hashlib.sha256(chr(10).join(sorted(functions(module))).encode()).hexdigest()}"


def changed(module: str, revision: str) -> int | None:
    """Return the number of ``functions(module)`` that the library did not hold at the commit ``revision``; None where
    git does not know that commit, as in a copy without history."""
    commit = revision.removesuffix("-dirty")
    then = _library_at(commit) if re.fullmatch("[0-9a-f]{7,64}", commit) else None
    if then is None:
        return None
    before = defaultdict[str, list[list[str]]](list)
    for form, *parameters in map(str.split, then.functions):
        before[form].append(parameters)
    new = map(str.split, functions(module) - then.functions)
    return sum(not any(_renamed(old, parameters, then.keywords) for old in before[form]) for form, *parameters in new)


def _renamed(before: list[str], after: list[str], keywords: Collection[str]) -> bool:
    """Return whether parameters only have other names: new ones to the function, for old ones that no call passed by
    keyword. A call that still passed an old one would fail, so no result could come of it."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    return all(old not in keywords and old not in after and new not in before for old, new in pairs)


@lru_cache(maxsize=8)  # a notebook asks for one or two experiments, several times
def functions(module: str) -> frozenset[str]:
    """Return each function, method, and statement outside of functions, in what ``module`` imports."""
    return _joined((name, (_LIBRARY / name).read_text(encoding="utf-8")) for name in imported(module)).functions


@lru_cache(maxsize=8)
def imported(module: str) -> tuple[str, ...]:
    """Return the files of ``module`` and of all that it imports of this library, relative to its folder, sorted.
    Imports within functions count as well."""
    modules, pending = dict[str, Path](), [module]
    while pending:
        name = pending.pop()
        path = _file(name)
        if path is None or name in modules:
            continue
        modules[name] = path
        pending += [name.rpartition(".")[0]] * ("." in name)
        text = path.read_text(encoding="utf-8")
        for source, names, plain in _IMPORTS.findall(text):
            pending += [source or plain, *(f"{source}.{part}" for part in re.findall(r"\w+", names) if source)]
        pending += [entry.partition(":")[0] for kind in _ASKED.findall(text) for entry in registered(kind).values()]
    compiled = {file.parent for path in modules.values() for file in path.parent.glob("*.cpp")}
    native = {file for folder in compiled for kind in _NATIVE for file in folder.glob(f"*{kind}")}
    return tuple(sorted(path.relative_to(_LIBRARY).as_posix() for path in {*modules.values(), *native}))


def _file(module: str) -> Path | None:
    """The file of a module; None for the name of something else, such as a function."""
    base = _LIBRARY.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _joined(files: Iterable[tuple[str, str]]) -> Code:
    """The functions of files, given by name and text, and the keywords of their calls."""
    forms, keywords = set[str](), set[str]()
    for name, text in files:
        if not name.endswith(".py"):
            forms.add(_sha1([text]))
            continue
        for statement, in_class in _pieces(ast.parse(text).body):
            normal = _NormalForm(statement, in_class)
            forms.add(" ".join([_sha1(normal.words), *normal.parameters]))
            keywords |= normal.keywords
    return Code(frozenset(forms), frozenset(keywords))


def _sha1(words: Iterable[str]) -> str:
    return hashlib.sha1("\0".join(words).encode(), usedforsecurity=False).hexdigest()


def _pieces(body: Iterable[ast.stmt], in_class: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield each function and each statement outside of functions, and whether a class holds it; of a class its head,
    and the statements of its body."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _pieces(statement.body, in_class=True)
            statement.body = []
        if not _is_idle(statement):
            yield statement, in_class


def _is_idle(node: ast.AST) -> bool:
    """Return whether a statement computes nothing. An import says where a thing is, not what it does."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant or isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass))


class _Scope:
    """The names that a function, a comprehension or a class binds: those of locals, which get numbers, and fixed
    ones."""

    def __init__(
        self, local: Iterable[str], fixed: Iterable[str], parent: _Scope | None, *, is_class: bool = False
    ) -> None:
        self.fixed, self.parent, self.is_class = {*fixed}, parent, is_class
        self.local = {*local} - self.fixed
        self.numbers = dict[str, str]()


class _NormalForm:
    """A statement as ``words``, in which locals are numbered in the order in which they come. Names of modules'
    members, attributes, keywords, imports, and functions and classes within functions stay."""

    def __init__(self, statement: ast.stmt, in_class: bool) -> None:
        self.words, self.parameters, self.keywords = list[str](), list[str](), set[str]()
        self._count = 0
        self._reads_names = any(isinstance(n, ast.Name) and n.id in _READS_NAMES for n in ast.walk(statement))
        self._add(statement, _Scope((), (), None, is_class=True) if in_class else None)

    def _name(self, name: str, scope: _Scope | None) -> str:
        """The number of the local that ``name`` means in ``scope``; the name where it means none."""
        within = scope
        while within and not self._reads_names:
            if within is scope or not within.is_class:  # what a function within a class does not see
                if name in within.fixed:
                    break
                if name in within.local:
                    self._count += name not in within.numbers
                    return within.numbers.setdefault(name, f"%{self._count}")
            within = within.parent
        return name

    def _add(self, node: ast.AST, scope: _Scope | None) -> None:
        if isinstance(node, ast.Name):
            self.words.append(self._name(node.id, scope))
        elif isinstance(node, _FUNCTIONS):
            self._add_function(node, scope)
        elif isinstance(node, _COMPREHENSIONS):
            self._add_comprehension(node, scope)
        elif isinstance(node, ast.ClassDef):
            self._add_fields(node, ("name", "bases", "keywords", "decorator_list"), scope)
            self._add_value(node.body, _Scope((), set().union(*_bound(node.body)), scope, is_class=True))
        elif isinstance(node, ast.AnnAssign) and not (scope and scope.is_class):
            if node.value:
                self._add(ast.Assign([node.target], node.value), scope)
        elif not _is_idle(node):
            if isinstance(node, ast.keyword) and node.arg:
                self.keywords.add(node.arg)
            self._add_fields(node, node._fields, scope)

    def _add_fields(self, node: ast.AST, fields: Iterable[str], scope: _Scope | None) -> None:
        kind = type(node).__name__
        self.words += ("(", kind)
        for field in fields:
            value = getattr(node, field, None)
            if field in ("ctx", "kind", "type_comment") or value == [] or (value is None and kind != "Constant"):
                continue  # releases of Python differ in what they leave out
            self.words.append(field)
            if (kind, field) in _NAMES and value:
                self.words += [self._name(name, scope) for name in ([value] if isinstance(value, str) else value)]
            else:
                self._add_value(value, scope)
        self.words.append(")")

    def _add_value(self, value: object, scope: _Scope | None) -> None:
        if isinstance(value, ast.AST):
            self._add(value, scope)
        elif isinstance(value, list):
            self.words.append("[")
            for item in value:
                self._add_value(item, scope)
            self.words.append("]")
        else:
            self.words.append(repr(value))

    def _add_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, outer: _Scope | None) -> None:
        """Add a function without annotations. Where the function takes any keyword, an old name of a parameter would be
        no error, so these names are words."""
        given = node.args
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        by_keyword = [argument.arg for argument in (*given.args, *given.kwonlyargs)]
        others = [argument and argument.arg for argument in (*given.posonlyargs, given.vararg, given.kwarg)]
        local, fixed = _bound(body)
        scope = _Scope({*local, *by_keyword, *filter(None, others)}, fixed, outer)
        self._add_fields(node, ("name", "decorator_list"), outer)
        self._add_value([*given.defaults, None, *given.kw_defaults], outer)
        self.words += [str(len(given.args)), str(len(given.kwonlyargs))]
        self.words += [self._name(name, scope) if name else "-" for name in by_keyword + others]
        self.words += by_keyword if given.kwarg else ()
        self.parameters += by_keyword
        self._add_value(body, scope)

    def _add_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, outer: _Scope | None
    ) -> None:
        targets = (name for part in node.generators for name in ast.walk(part.target) if isinstance(name, ast.Name))
        scope = _Scope((name.id for name in targets if isinstance(name.ctx, ast.Store)), (), outer)
        self._add(node.generators[0].iter, outer)
        for number, part in enumerate(node.generators):
            self._add_fields(part, ("iter", "target", "ifs", "is_async")[number == 0 :], scope)
        self._add_fields(node, ("elt", "key", "value"), scope)


def _bound(body: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """The names that a function's or a class's body binds: those of locals, and of what keeps its name."""
    local, fixed, outer = set[str](), set[str](), set[str]()
    waiting = [(node, False) for node in body]
    while waiting:
        node, in_comprehension = waiting.pop()
        if isinstance(node, ast.Name):
            local |= {node.id} if not (in_comprehension or isinstance(node.ctx, ast.Load)) else set()
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            fixed.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            fixed |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Global):
            fixed |= {*node.names}
        elif isinstance(node, ast.Nonlocal):
            outer |= {*node.names}
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.NamedExpr):  # it binds outside of a comprehension
                local.add(node.target.id)
            local |= {name for field in ("name", "rest") if (name := getattr(node, field, None))}
            inside = in_comprehension or isinstance(node, _COMPREHENSIONS)
            waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return local - outer, fixed


@lru_cache(maxsize=8)
def _library_at(revision: str) -> Code | None:
    """All functions at a commit, kept in the cache; None for a commit that is not here.

    Reading the 600 files of a commit takes about two seconds, which a notebook with several records would feel.
    """
    cache_file = paths.CACHE / "code" / f"{FORM}-{revision}.json"
    if cache_file.is_file():
        return Code(*map(frozenset, json.loads(cache_file.read_text(encoding="utf-8"))))
    try:
        rows = [line.split("\t", 1) for line in git("ls-tree", "-r", revision, "lib").decode().splitlines()]
        wanted = {name: about.split()[2] for about, name in rows if name.endswith((".py", *_NATIVE))}
        texts = dict(zip(wanted, blobs(wanted.values()), strict=True))
    except (OSError, subprocess.CalledProcessError):
        return None
    library = _joined((name, text.decode()) for name, text in texts.items())
    write_text(cache_file, json.dumps([*map(sorted, library)]))
    return library


def git(*arguments: str, given: str = "") -> bytes:
    """Return git's output in this repository. Raises OSError where there is no git, and CalledProcessError where it
    fails."""
    command = ["git", "-C", str(paths.ROOT), *arguments]
    return subprocess.run(command, input=given.encode(), check=True, capture_output=True).stdout


def blobs(names: Collection[str]) -> Iterator[bytes]:
    """The contents of the objects that git knows by ``names``, in their order. Raises as :func:`git`."""
    output, offset = git("cat-file", "--batch", given="\n".join(names)), 0
    for _ in names:
        line = output.index(b"\n", offset)
        size = int(output[offset:line].split()[2])
        yield output[line + 1 : line + 1 + size]
        offset = line + size + 2
