"""A dataclass as a schema: what is converted, what is refused, and how it is said."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from firsttoken.study.parsing.parse_errors import ParseError
from firsttoken.study.parsing.schema import at_least, between, digits, non_empty, parse_as, plain_name


@dataclass(frozen=True)
class Inner:
    size: Annotated[int, at_least(1)]
    name: Annotated[str, plain_name] = "x"


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    inner: tuple[Inner, ...] = ()
    rate: float | None = None
    pair: tuple[int, str] | str = ""
    table: dict[str, Annotated[float, between(0, 2)]] | None = None
    anything: Any = None
    sums: Annotated[tuple[Annotated[str, digits(4)], ...], non_empty] = ("abcd",)


def test_what_is_read():
    inner = [{"size": 2}, {"size": 3, "name": "y"}]
    built = parse_as(Outer, {"kind": "a", "inner": inner, "rate": 1, "pair": [1, "z"], "table": {"k": 2}})
    assert built == Outer("a", (Inner(2), Inner(3, "y")), 1.0, (1, "z"), {"k": 2.0})
    assert isinstance(built.rate, float) and parse_as(Outer, {"kind": "a", "x": 1}, others=True) == Outer("a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "c"}, r"kind: 'c' is not known; known: a, b"),
        ({"kind": None}, "kind: None is not known"),
        ({"inner": [{"size": 1}, {}]}, r"inner\[1\]: missing key 'size'"),
        ({"inner": [{"size": 0}]}, r"inner\[0\].size: expected 1 or more, not 0"),
        ({"inner": [{"size": True}]}, "expected int, not True"),
        ({"inner": [{"size": 1.0}]}, "expected int, not 1.0"),
        ({"inner": [{"size": 1, "nam": "y"}]}, r"unknown key 'nam'; known: name, size \(did you mean 'name'\?\)"),
        ({"inner": [{"size": 1, "name": "../y"}]}, "without a folder, not '../y'"),
        ({"inner": {}}, "inner: expected"),
        ({"inner": [[]]}, "expected a mapping"),
        ({"rate": "1e-4"}, "rate: expected float"),
        ({"rate": True}, "rate: expected float"),
        ({"rate": float("nan")}, "rate: expected float"),
        ({"pair": [1]}, "pair: expected"),
        ({"table": {"k": 3}}, r"table\['k'\]: expected 0 to 2, not 3"),
        ({"sums": []}, "sums: expected at least one"),
        ({"sums": ["ABCD"]}, "expected 4 hex"),
    ],
    ids=str,
)
def test_what_is_refused(change, words):
    with pytest.raises(ParseError, match=words) as caught:
        parse_as(Outer, {"kind": "a"} | change)
    assert "\n" not in str(caught.value)


def test_a_worker_may_read_before_it_imports_anything():
    names = ("parse_errors", "json_text", "schema", "safetensors_header")
    code = f"import sys; {'; '.join(f'import firsttoken.study.parsing.{name}' for name in names)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "yaml", "safetensors", "pydantic"} & set(loaded)
