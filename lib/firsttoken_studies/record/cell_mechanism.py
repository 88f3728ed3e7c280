"""Whether a mechanism that a notebook hands to a study is still the one that its cell was published with.

A study runs a second time, with the reader's mechanism beside the library's, only where the cell was changed: the
published cell is held to be the library's by the notebook's own check.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from firsttoken.study import paths
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.parsing.yaml_text import read_yaml
from firsttoken_studies.record.notebooks import notebook_paths, read_notebook


def digest(cell: str) -> str:
    """Return the digest of the source of a ``cell``, up to comments, docstrings and layout."""
    tree = ast.parse(cell)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def is_changed(mechanism: Any) -> bool:
    """Return whether ``mechanism``, a class or function, was defined by another cell than a published one.

    A cell that stands in a notebook as it was published is not changed, nor is what the library defines. Several
    notebooks run one study, so that the cell may be that of any of them.
    """
    if getattr(mechanism, "__module__", "").partition(".")[0].startswith("firsttoken"):
        return False
    return digest(_cell_of(mechanism)) not in chain.from_iterable(read_yaml(paths.MECHANISMS).values())


def published() -> str:
    """Return the digests of the cells tagged ``mechanism``, a line a notebook, as they stand in the notebooks now."""
    lines = []
    for notebook in notebook_paths():
        cells = [
            cell for cell in read_notebook(notebook)["cells"] if "mechanism" in cell.get("metadata", {}).get("tags", ())
        ]
        if cells:
            digests = ", ".join(f'"{digest("".join(cell["source"]))}"' for cell in cells)
            lines.append(f'"{notebook.name[:2]}": [{digests}]')
    return "\n".join(lines)


def _cell_of(mechanism: Any) -> str:
    """Return the source of the cell that defines ``mechanism``; "" where it cannot be known.

    ``inspect.getsource`` finds no class of a notebook, as its module has no file; the code of its methods has one.
    """
    functions = [mechanism, *vars(mechanism).values()] if inspect.isclass(mechanism) else [mechanism]
    plain = [getattr(function, "__func__", function) for function in functions]  # as within a static method
    code = next((function.__code__ for function in plain if hasattr(function, "__code__")), None)
    return "" if code is None else "".join(linecache.getlines(code.co_filename))


def taken(study: str, function: Callable[..., Any], mechanisms: Mapping[str, Any]) -> None:
    """Check that the ``study`` of ``function`` takes ``mechanisms``: they are its parameters that go by keyword only.

    Raises ProfileError, which names those that it takes.
    """
    accepted = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if wrong := next((name for name in mechanisms if name not in accepted), ""):
        raise ProfileError(f"{study} takes no mechanism {wrong!r}; {unknown(wrong, accepted)}")
