"""What packages beside the library add to it, by name; it is imported when it is asked for (standard library only).

A package that is not there adds nothing, and the library serves without it. A name leads to "module:object", so that a
process that does not ask for it pays for neither the module nor what it imports.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

EXTRAS, CPU = "firsttoken_extras", "firsttoken_cpu"
# named, not imported: arrows lead from them to the library
PACKAGES = ("firsttoken_studies", EXTRAS, "firsttoken_serve")
REGISTERED = (CPU, EXTRAS)


def commands() -> tuple[ModuleType, ...]:
    """The modules that add to the command line: ``COMMANDS``, ``add_options``, which makes their parsers, and, where it
    is there, ``MORE_OPTIONS``, which adds to the library's: by the command's name a function of its parser. Those of
    ``ANYWHERE`` need no clone, and those of ``OWN_ENDS`` answer signals themselves."""
    present = (package for package in PACKAGES if importlib.util.find_spec(package) is not None)
    return tuple(importlib.import_module(f"{package}.commands") for package in present)


def files(name: str) -> list[Path]:
    """The files called ``name`` in folders of the packages, sorted; none of these is imported for it."""
    present = filter(None, map(importlib.util.find_spec, PACKAGES))
    folders = (Path(folder) for spec in present for folder in spec.submodule_search_locations or ())
    return sorted(path for folder in folders for path in folder.glob(f"*/{name}"))


@cache
def registered(kind: str) -> Mapping[str, str]:
    """Return the objects that the extras register as ``kind`` (an attribute of their ``registered`` module):
    "module:object" by name."""
    present = (package for package in REGISTERED if importlib.util.find_spec(package) is not None)
    modules = [importlib.import_module(f"{package}.registered") for package in present]
    return {name: path for module in modules for name, path in getattr(module, kind, {}).items()}


def extension(kind: str, name: str) -> Any:
    """The object that is registered as ``name``. Raises KeyError where none is, and ImportError for what it needs."""
    module, _, attribute = registered(kind)[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
