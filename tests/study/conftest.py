"""A repository of its own for each test, in a temporary folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import entry

from firsttoken.study import paths
from firsttoken_studies.record import kernel_forkserver
from firsttoken_studies.record.claims import Claim, claim_files
from firsttoken_studies.record.results import Result

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository with the real quick profile, style and claims, to which every path points.

    Its notebooks compute nothing: their kernels are copies of a process that has imported no torch.
    """
    (tmp_path / "env" / "profiles").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()
    for name in ("env/profiles/quick.yaml", "env/models.yaml", "env/matplotlibrc"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for path in claim_files(paths.STUDIES):
        copy = tmp_path / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
    repository = paths.ROOT
    for name, value in vars(paths).items():
        if isinstance(value, Path) and name.isupper() and value.is_relative_to(repository):
            monkeypatch.setattr(paths, name, tmp_path / value.relative_to(repository))
    monkeypatch.setattr(paths, "CACHE", tmp_path / ".cache")
    monkeypatch.setattr(kernel_forkserver, "MODULES", ("papermill.cli", "ipykernel.kernelapp"))
    return tmp_path


@pytest.fixture
def make_result() -> Callable[..., Result]:
    """A small valid result; keyword arguments replace its fields."""

    def make(**changes: Any) -> Result:
        fields: dict[str, Any] = {
            "experiment": "machine",
            "profile": "quick",
            "parameters": {"seed": 0},
            "machine": {"slug": "test-cpu-2c", "gpu": None},
            "provenance": {"kind": "random"},
            "git_revision": "unknown",
            "seeds": [0],
            "started": "2026-01-01T00:00:00+00:00",
            "duration_s": 1.5,
            "entries": {},
            "rows": [{"trial": 0, "copy_s": 0.25}, {"trial": 1, "copy_s": 0.5}],
            "floors": {"copy_s": {"value": 0.2, "unit": "s", "why": "bytes over bandwidth"}},
            "summary": [entry("copy_s", value=0.375, low=0.25, high=0.5, n=2, unit="s")],
        }
        return Result(**fields | changes)

    return make


@pytest.fixture
def claim() -> Callable[..., Claim]:
    """A small valid claim; keyword arguments replace its fields."""

    def make(**changes: Any) -> Claim:
        fields = {"id": "c", "report": "progressive", "place": "Table 1", "says": "says so", "kind": "exact"}
        fields |= {"value": 25, "measure": "m", "experiment": "machine", "notebook": "00"}
        return Claim(**fields | {"human_min": 1, "compute_min": 0.5} | changes)

    return make


@pytest.fixture
def write_notebook(root: Path) -> Callable[..., Path]:
    """Writes notebooks/<name>.ipynb with the given code cells after a parameters cell."""

    def write(name: str, *cells: str) -> Path:
        def code(source: str, *tags: str) -> dict[str, Any]:
            fixed = {"cell_type": "code", "execution_count": None, "outputs": []}
            return fixed | {"id": f"c{abs(hash(source))}", "metadata": {"tags": list(tags)}, "source": source}

        title = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": f"# About {name}"}
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        content = {
            "cells": [title, code('profile = "none"', "parameters"), *map(code, cells)],
            "metadata": kernel,
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        path = root / "notebooks" / f"{name}.ipynb"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return write
