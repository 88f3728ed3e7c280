"""Formulas of Python as JavaScript: functions of arithmetic, ``min`` and ``max``, translated from their source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def exported(module: ModuleType, functions: Mapping[str, Callable[..., Any]], constants: Mapping[str, float]) -> str:
    """JavaScript with the ``constants`` and ``functions`` of ``module`` by their names.

    Raises ValueError for a function that is more than assignments and a return of arithmetic.
    """
    lines = [f"const {name} = {value!r};" for name, value in constants.items()]
    lines += [_function(name, function) for name, function in functions.items()]
    return f"// Made by `firsttoken site` from {module.__name__}; do not edit.\n" + "\n".join(lines) + "\n"


def _function(name: str, function: Callable[..., Any]) -> str:
    (node,) = ast.parse(inspect.getsource(function)).body
    if not isinstance(node, ast.FunctionDef):
        raise ValueError(f"{name} is no plain function")
    said = [_statement(name, one) for one in node.body if not _is_docstring(one)]
    return f"function {name}({', '.join(argument.arg for argument in node.args.args)}) {{ {' '.join(said)} }}"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _statement(name: str, node: ast.stmt) -> str:
    if isinstance(node, ast.Return) and node.value is not None:
        return f"return {_value(name, node.value)};"
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return f"const {node.targets[0].id} = {_value(name, node.value)};"
    raise ValueError(f"{name}: line {node.lineno} of it is neither an assignment nor a return")


def _value(name: str, node: ast.expr) -> str:
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return f"({_value(name, node.left)} {_SIGNS[type(node.op)]} {_value(name, node.right)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return repr(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        inner = ", ".join(_value(name, argument) for argument in node.args)
        if node.func.id == "Times":
            return f"[{inner}]"
        return f"Math.{node.func.id}({inner})" if node.func.id in ("min", "max") else f"{node.func.id}({inner})"
    raise ValueError(f"{name}: {ast.unparse(node)} is no arithmetic that a page can have")
