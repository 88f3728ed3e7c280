"""What readers refuse, in one line that names the file, the place and the mend."""

from __future__ import annotations

import gzip
import json
import os

import pytest
import yaml
from safetensors import safe_open

from firsttoken.study.errors import CorpusError
from firsttoken.study.parsing.json_text import json_lines, parse_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, read_bytes, read_gzip, shown
from firsttoken.study.parsing.safetensors_header import read_header
from firsttoken.study.parsing.yaml_text import parse_yaml, read_entries


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 1}', "the key 'a' is there twice"),
        ("[NaN]", "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("[1e999]", "the number 1e999 is too large"),
        ("[1E+999]", r"the number 1E\+999 is too large"),
        ("[1.0, " + "1" * 21 + "]", "has 21 digits"),
        ('["\\udc00"]', "surrogate"),
        ("9" * 5001, "has 5001 digits"),
        ("[" * 100_000, "deep"),
        ("[" * 80 + "]" * 80, "more than 64 deep"),
        ('{"a": ' * 80 + "1" + "}" * 80, "more than 64 deep"),
        ('["\\ud800"]', "surrogate"),
        ("[1, 2", "truncated or no JSON"),
        ("", "truncated or no JSON"),
        (b"\xff", "utf-8"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_json_that_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_json(text)


def test_json_that_is_read():
    value = {"a": [1, 2.5, None, True, "ü\u2028"], "b": {"c": []}}
    assert parse_json(json.dumps(value)) == parse_json(json.dumps(value).encode()) == value
    assert parse_json('["\\ud83d\\ude00"]') == ["😀"]
    with pytest.raises(ParseError, match="line 2: it is torn or no JSON"):
        list(json_lines(b"[1]\n[2\n"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "line 2: the key 'a' is there twice"),
        ("a: &x [1]\nb: *x", "line 1: anchors and aliases are not read"),
        ("a: .nan", r"line 1: \.nan is no finite number"),
        ("a: -.inf", "is no finite number"),
        ("a: 1e999", "is no finite number"),
        ("true: 2", "line 1: the key True is no text; put it in quotes"),
        ("1: 2\n'1': 3", "line 2: the key '1' is there twice"),
        ("? [a]\n: b", "is no text"),
        ("a: !!python/name:os.system", "tags such as"),
        ("a: !!timestamp 2024-01-01", "tags such as"),
        ("[" * 5000, "more than 32 levels deep"),
        ("- a: " + "{" * 5000, "line 1: it is more than 32 levels deep"),
        ("- " * 5000, "more than 32 levels deep"),
        ("a: " + "9" * 5001, "has 5001 digits"),
        ('a: "\\ud800"', "surrogate"),
        ("a: [", "line 1: it is no YAML"),
        ("a: b: c", "line 1: it is no YAML"),
        ("a: \x00", "it is no YAML"),
        (b"a: \xff", "utf-8"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_yaml_that_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_yaml(text)


def test_no_bracket_is_looked_at_beyond_the_deepest_level(monkeypatch):
    """The scanner looks far ahead of what is read, and each bracket costs it a look at all that are open."""
    seen, opened = [], yaml.SafeLoader.fetch_flow_collection_start
    monkeypatch.setattr(
        yaml.SafeLoader, "fetch_flow_collection_start", lambda loader, kind: (seen.append(kind), opened(loader, kind))
    )
    with pytest.raises(ParseError, match="more than 32 levels deep"):
        parse_yaml("{" * 1000)
    assert len(seen) <= 32


def test_yaml_is_that_of_the_core_schema(tmp_path):
    text = "a: 1e-4\nb: 2024-01-01\nc: no\nd: 1_0\ne: true\nf: ~\ng: -3\nh: '7'\ni: [.5, 012, 1:30]\n"
    expected = {"a": 1e-4, "b": "2024-01-01", "c": "no", "d": "1_0", "e": True, "f": None, "g": -3, "h": "7"}
    assert parse_yaml(text) == expected | {"i": [0.5, "012", "1:30"]}
    (tmp_path / "list.yaml").write_text("- a: 1\n# between\n- b\n")
    assert read_entries(tmp_path / "list.yaml") == [(1, {"a": 1}), (3, "b")]
    (tmp_path / "list.yaml").write_text("a: 1\n")
    with pytest.raises(ParseError, match="expected a list"):
        read_entries(tmp_path / "list.yaml")


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "name", "zero"])
def test_what_is_no_file_is_blamed_and_never_waited_for(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    path = {"name": tmp_path / ("x" * 5000), "zero": tmp_path / "a\0b"}.get(kind, path)
    with (
        pytest.raises(CorpusError, match=r"; bring it again$") as caught,
        errors_as(path, CorpusError, "bring it again"),
    ):
        read_bytes(path)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_limits_and_lines(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * 101)
    with pytest.raises(ParseError, match="101 bytes, and at most 100"):
        read_bytes(tmp_path / "large", 100)
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(10**6)))
    with pytest.raises(ParseError, match="unpacks to more than 1,000 bytes"):
        read_gzip(tmp_path / "bomb", 1000)
    assert shown("a\nb\u202e") == r"'a\nb\u202e'" and len(shown("x" * 100)) == 40


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"a": ENTRY | {"data_offsets": ""}}, "a.data_offsets: expected"),
        ({"a": ENTRY | {"data_offsets": [0]}}, "a.data_offsets: expected"),
        ({"a": ENTRY | {"data_offsets": [0.0, 8.0]}}, "expected int, not 0.0"),
        ({"a": ENTRY | {"data_offsets": [-8, 0]}}, "expected 0 or more, not -8"),
        ({"a": ENTRY | {"shape": [-1, -2]}}, "expected 0 or more, not -1"),
        ({"a": ENTRY | {"shape": [0, 10**18]}}, "0 bytes by its shape"),
        ({"a": ENTRY | {"dtype": "F64"}}, "16 bytes by its shape"),
        ({"a": ENTRY | {"dtype": "nonsense"}}, "the dtype 'nonsense' is none that is read"),
        ({"a": ENTRY, "b": ENTRY}, "the one before ends at"),
        ({"a": ENTRY | {"shape": [1], "data_offsets": [0, 4]}}, "is truncated or altered"),
        ({"a": ENTRY, "__metadata__": {"a": 1}}, "expected str, not 1"),
        ([], "is no mapping"),
    ],
)
def test_headers_that_are_refused(tmp_path, table, words):
    head = json.dumps(table).encode()
    (tmp_path / "x").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(ParseError, match=words):
        read_header(tmp_path / "x")


@pytest.mark.parametrize("table", [{"a": ENTRY | {"colour": 1}}, {"a": ENTRY, "__metadata__": None}])
def test_headers_that_the_reference_takes(tmp_path, table):
    """The safetensors package passes over another key of an entry, and takes null for no metadata."""
    head = json.dumps(table).encode()
    (tmp_path / "x").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with safe_open(tmp_path / "x", "np") as reference:
        assert list(reference.keys()) == list(read_header(tmp_path / "x").tensors) == ["a"]


@pytest.mark.parametrize("content", [b"", b"\x05", bytes(8), (1 << 62).to_bytes(8, "little") + b"{}"])
def test_files_without_a_header(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ParseError, match="truncated or no safetensors file"):
        read_header(tmp_path / "x")
