"""Weights files that are overwritten or cut while a service runs: answers stay, and nothing else is answered."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from services import GREEDY, TIMEOUT_S, serving

from firsttoken.assets.checkpoint import weight_files
from firsttoken.assets.held import unchanged
from firsttoken.study.errors import ModelError

Damage = Callable[[Path], None]


def overwritten(file: Path) -> None:
    """In place, as `cp` over it does."""
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(size // 8)
        opened.write(os.urandom(size - size // 8))


def cut(file: Path) -> None:
    os.truncate(file, 5000)


def ask(url: str) -> httpx.Response:
    body = {"prompt": "the inn", "max_tokens": 12} | GREEDY
    return httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)


@pytest.fixture(params=["lean", "transformers"])
def folder(request: pytest.FixtureRequest, plain: Path, tmp_path: Path) -> Path:
    """A plain folder, read by lean layers or by transformers' own."""
    at = Path(shutil.copytree(plain, tmp_path / "model"))
    if request.param == "transformers":
        config = (at / "config.json").read_text()
        (at / "config.json").write_text(config.replace("{", '{"partial_rotary_factor": 1.0,', 1))
    return at


@pytest.mark.parametrize("damage", [overwritten, cut])
def test_answers_stay(folder: Path, damage: Damage) -> None:
    """No page of the file is mapped once the model is there."""
    with serving(folder) as url:
        before = ask(url).json()["choices"]
        assert str(folder) not in Path("/proc/self/maps").read_text()
        damage(folder / "model.safetensors")
        assert ask(url).json()["choices"] == before


def test_a_file_that_changes_while_it_is_read_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    with pytest.raises(ModelError, match="were changed"), unchanged(weight_files(folder)):
        overwritten(folder / "model.safetensors")
