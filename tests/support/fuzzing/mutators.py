"""Ways to damage a file: its bytes, the numbers and words in its text, the tree that its text stands for, its place."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = [
    *("NaN", "Infinity", "-Infinity", "1e999", "-1", "-0", "0", "1e308", "1" * 30, "9" * 5001, "1_0", "0x10", "1.5"),
    *(".nan", ".inf", "null", "true", "no", "2024-01-01", "!!python/name:os.system", "&a [*a]", "<<", "~", '"', "'"),
    *("[" * 5000, "{" * 5000, "../..", "\\ud800", "\u202e", "\x00", "\ufeff", "", ",", "-", ":"),
]
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 7, 10**7, 10**12, 2**63, 10**30, 1.5, -0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "x" * 5000, "../..", "/etc/passwd", "~nosuchuser/x", "a\x00b", "\ud800", "\u202e", "1e-4", "NaN"),
    *([], {}, [[]], {"a": 1}, [1, 2], [-32, -32], [0, 10**30]),
]
Mutator = Callable[[bytes, random.Random], bytes]


def flip(data: bytes, dice: random.Random) -> bytes:
    """One bit is another."""
    changed = bytearray(data)
    changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def truncate(data: bytes, dice: random.Random) -> bytes:
    """The end is missing; at times everything."""
    return data[: dice.choice([0, 1, 8, len(data) - 1, dice.randrange(len(data))])]


def insert(data: bytes, dice: random.Random) -> bytes:
    """A few bytes too many."""
    at = dice.randrange(len(data))
    return data[:at] + dice.randbytes(dice.randrange(1, 9)) + data[at:]


def cut(data: bytes, dice: random.Random) -> bytes:
    """A piece is missing."""
    at = dice.randrange(len(data))
    return data[:at] + data[at + dice.randrange(1, 64) :]


def swap(data: bytes, dice: random.Random) -> bytes:
    """Two pieces have changed places."""
    size = dice.randrange(1, max(2, min(64, len(data) // 3)))
    a, b = sorted(dice.randrange(max(1, len(data) - size)) for _ in range(2))
    if b < a + size:
        return data
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def repeat(data: bytes, dice: random.Random) -> bytes:
    """A piece is there twice."""
    at = dice.randrange(len(data))
    end = at + dice.randrange(1, 200)
    return data[:end] + data[at:end] + data[end:]


def word(data: bytes, dice: random.Random) -> bytes:
    """A number or a word of the text is something else."""
    import re

    found = list(re.finditer(rb"[-\w.]+", data))
    if not found:
        return data
    at = dice.choice(found)
    return data[: at.start()] + dice.choice(WORDS).encode("utf-8", "surrogatepass") + data[at.end() :]


BYTES: tuple[Mutator, ...] = (flip, truncate, insert, cut, swap, repeat)
TEXT: tuple[Mutator, ...] = (*BYTES, word, word, word)


def tree(value: Any, dice: random.Random) -> str:
    """JSON of ``value`` with one node of it removed, renamed, there twice, exchanged, or something else."""
    value = copy.deepcopy(value)
    holders = [holder for holder in _containers(value) if len(holder)]
    if not holders:
        return json.dumps(dice.choice(VALUES))
    holder = dice.choice(holders)
    key = dice.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = dice.choice(["value", "value", "value", "remove", "rename", "twice", "swap", "deep"])
    if kind == "remove":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[dice.choice(["x", "", "__metadata__", "\u202e", str(key) + "s"])] = holder.pop(key)
    elif kind == "twice" and isinstance(holder, dict):
        mark = "\u0001twice"
        holder[mark] = dice.choice(VALUES)
        return json.dumps(value).replace(json.dumps(mark), json.dumps(str(key)))
    elif kind == "swap":
        other = dice.choice(holders)
        there = dice.choice(list(other) if isinstance(other, dict) else range(len(other)))
        holder[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(holder[key])
    elif kind == "deep":
        mark = "\u0001deep"
        holder[key] = mark
        depth = dice.choice([80, 900, 100_000])
        return json.dumps(value).replace(json.dumps(mark), "[" * depth + "]" * depth)
    else:
        holder[key] = dice.choice([*VALUES, *_near(holder[key])])
    return json.dumps(value)


def _near(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if type(value) is int:
        return [value + 1, value - 1, value * 2, value + 4, -value]
    if type(value) is float:
        return [value * 2, -value]
    if isinstance(value, str) and value:
        return [value[1:], value + " ", value.upper()]
    return [value[:-1], value + value] if isinstance(value, list) else []


def _containers(value: Any) -> list[Any]:
    if not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(found for item in inner for found in _containers(item))]


def place(path: Path, dice: random.Random) -> str:
    """Something else stands where the file was; returns what."""
    kind = dice.choice(["missing", "folder", "pipe", "device", "loop", "empty"])
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "empty":
        path.write_bytes(b"")
    return kind
