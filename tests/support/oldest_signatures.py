"""The keyword arguments that the oldest admitted releases of our dependencies take, for the calls that are made here.

``python tests/support/oldest_signatures.py FOLDER`` writes ``tests/oldest_signatures.yaml`` anew. FOLDER holds a folder
for each distribution, with its wheel unpacked, at the lower bound that pyproject.toml states (``pip download --no-deps
torch==2.11.0``, then ``unzip``). Nothing of it is imported.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "oldest_signatures.yaml"
# the package to import of a distribution, where that is called otherwise
PACKAGES = {"grpcio": "grpc", "pyzmq": "zmq", "runai-model-streamer": "runai_model_streamer"}
# what repeats the names of others, and the hundreds of models that are not used
_ASIDE = re.compile(
    r"/(tests?|testing|_inductor|_dynamo|onnx|thirdparty_files|models/(?!llama/|qwen2/|bloom/|auto/)\w+)/"
)
OPEN = "**"  # any keyword: it is passed on
# methods that are called on objects: what calls them is not imported, so the class is named here
METHODS = {
    "generate_batch": "transformers.generation.ContinuousMixin",
    "load_adapter": "peft.PeftModel",
    "zero_grad": "torch.optim.Optimizer",
    "register_buffer": "torch.nn.Module",
    "register_forward_pre_hook": "torch.nn.Module",
    "named_parameters": "torch.nn.Module",
    "stream_files": "runai_model_streamer.SafetensorsStreamer",
    "add_insecure_port": "grpc.aio.Server",
}


def lower_bounds() -> dict[str, str]:
    """The version that pyproject.toml states at least, by the package that is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    found = (re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", one) for one in stated)
    return {PACKAGES.get(match[1], match[1]): match[2] for match in found if match}


@dataclass(frozen=True)
class Call:
    """A call in a file of the package with ``keywords`` to what ``name`` is, spelt with its module."""

    where: str
    name: str
    keywords: frozenset[str]


def calls(packages: set[str]) -> Iterator[Call]:
    """Every call in ``lib`` to a name of one of ``packages`` that passes keywords."""
    for path in sorted((ROOT / "lib").rglob("*.py")):
        yield from calls_in(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix(), packages)


def calls_in(text: str, where: str, packages: set[str]) -> Iterator[Call]:
    """``calls`` of one file. A dictionary that is unpacked is not followed."""
    tree = ast.parse(text)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            bound |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            for one in node.names:
                bound[one.asname or one.name.split(".")[0]] = one.name if one.asname else one.name.split(".")[0]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = frozenset(one.arg for one in node.keywords if one.arg)
        if keywords and (name := _spelt(node.func, bound)) and name.split(".")[0] in packages:
            yield Call(f"{where}:{node.lineno}", name, keywords)


def _spelt(function: ast.expr, bound: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name) and function.id in bound:
        return ".".join([bound[function.id], *reversed(parts)])
    return f"{METHODS[parts[0]]}.{parts[0]}" if parts and parts[0] in METHODS else None


class Sources:
    """The definitions in unpacked wheels, by their own name; which module offers it to the outside is not followed."""

    def __init__(self, folder: Path, packages: set[str]) -> None:
        self._defined: dict[tuple[str, str], list[ast.AST]] = {}
        for package in sorted(packages):
            home = next(folder.glob(f"*/{package}"), None) or sys.exit(f"{folder} has no wheel of {package}")
            for path in (*home.rglob("*.py"), *home.rglob("*.pyi")):
                if _ASIDE.search(path.as_posix()):
                    continue
                self._read(package, path)

    def _read(self, package: str, path: Path) -> None:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError:
            return
        bodies = [tree.body]
        while bodies:
            for node in bodies.pop():
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    self._defined.setdefault((package, node.name), []).append(node)
                elif isinstance(node, ast.If | ast.Try):
                    bodies += [node.body, node.orelse]

    def keywords(self, name: str) -> set[str]:
        """All keywords that a definition of this name takes."""
        package, *inner = name.split(".")
        found: set[str] = set()
        nodes = self._defined.get((package, inner[-1]), [])
        if len(inner) > 1 and (owners := self._defined.get((package, inner[-2]))):
            nodes = [one for owner in owners for one in self._methods(package, owner, inner[-1])] or nodes
        for node in nodes:
            found |= self._of(package, node)
        if not nodes:
            raise SystemExit(f"{name}: no definition is found; name its class in METHODS")
        return found

    def _methods(self, package: str, owner: ast.AST, name: str) -> list[ast.AST]:
        if not isinstance(owner, ast.ClassDef):
            return []
        own = [one for one in owner.body if getattr(one, "name", None) == name]
        return own or [found for base in self._bases(package, owner) for found in self._methods(package, base, name)]

    def _bases(self, package: str, node: ast.ClassDef) -> list[ast.AST]:
        names = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
        return [one for name in names if name != node.name for one in self._defined.get((package, name), [])]

    def _of(self, package: str, node: ast.AST) -> set[str]:
        if isinstance(node, ast.ClassDef):
            made = [*self._methods(package, node, "__init__"), *self._methods(package, node, "__new__")]
            stated = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
            fields = {target.id for target in stated if isinstance(target, ast.Name)}
            for base in self._bases(package, node) if not made else ():
                fields |= self._of(package, base)
            return fields.union(*(self._of(package, one) for one in made))
        stated = node.args
        names = {one.arg for one in (*stated.args, *stated.kwonlyargs)} - {"self", "cls"}
        return names | ({OPEN} if stated.kwarg else set())


def main() -> None:
    bounds = lower_bounds()
    sources = Sources(Path(sys.argv[1]), set(bounds))
    names = sorted({call.name for call in calls(set(bounds))})
    taken = {name: sources.keywords(name) for name in names}
    table = {
        "read_from": bounds,
        "taken": {name: OPEN if OPEN in found else " ".join(sorted(found)) for name, found in taken.items()},
    }
    TABLE.write_text(yaml.safe_dump(table, sort_keys=False, width=118), encoding="utf-8")


if __name__ == "__main__":
    main()
