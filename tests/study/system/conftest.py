"""A system of the test's own: /proc and /sys as folders, the C library without a function."""

from __future__ import annotations

import ast
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from firsttoken.study.system import kernel_files

NOBODY = 65534


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /proc, as on a system without one."""
    monkeypatch.setattr(kernel_files, "PROC", tmp_path / "proc")
    return tmp_path / "proc"


@pytest.fixture
def sys_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /sys."""
    monkeypatch.setattr(kernel_files, "SYS", tmp_path / "sys")
    return tmp_path / "sys"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Takes names away from the module os."""

    def take(*names: str) -> None:
        for name in names:
            monkeypatch.delattr(os, name, raising=False)

    return take


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proc: Path, sys_folder: Path) -> Callable[[str], None]:
    """macOS as far as the library asks: no /proc, no /sys, and a ``sysctl`` that answers with a shell script's body."""

    def make(body: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "sysctl").write_text(f"#!/bin/sh\n{body}\n")
        (folder / "sysctl").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        monkeypatch.setattr("sys.platform", "darwin")

    return make


@pytest.fixture
def library_without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A C library that lacks a function."""

    def take(name: str) -> None:
        class Library:
            def __init__(self, path: None) -> None:
                self._real = real(path)

            def __getattr__(self, asked: str) -> object:
                if asked == name:
                    raise AttributeError(asked)
                return getattr(self._real, asked)

        real = ctypes.CDLL
        monkeypatch.setattr(ctypes, "CDLL", Library)

    return take


@pytest.fixture
def as_nobody() -> Callable[[Callable[[], object]], object]:
    """Calls a function in a process of a user without any right; its answer, which must be a literal."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")

    def call(function: Callable[[], object]) -> object:
        source, sink = os.pipe()
        child = os.fork()  # not a new interpreter: another user may not be able to read the one that runs the tests
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                answer = repr(function())
            except BaseException as error:
                answer = repr(f"{type(error).__name__}: {error}")
            os.write(sink, answer.encode())
            os._exit(0)
        os.close(sink)
        with os.fdopen(source) as answers:
            text = answers.read()
        os.waitpid(child, 0)
        return ast.literal_eval(text)

    return call
