"""A cache and a lock of their own for every test; the pinned assets only where a test is marked `assets`."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path

import pytest
import yaml

from firsttoken.study import paths


@pytest.fixture(autouse=True)
def _private(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("assets"):
        monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")


class TinyWheel:
    """A wheel with one member, and the lock that pins it."""

    def __init__(self, folder: Path, content: bytes) -> None:
        self.content = content
        self.file = folder / "tinyasset-1.0-py3-none-any.whl"
        members = {
            "tinyasset/data.gguf": content,
            "tinyasset-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tinyasset\nVersion: 1.0\n",
            "tinyasset-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(self.file, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
            digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in members.items()}
            record = "".join(
                f"{name},sha256={digests[name].decode().rstrip('=')},{len(data)}\n" for name, data in members.items()
            )
            archive.writestr("tinyasset-1.0.dist-info/RECORD", record + "tinyasset-1.0.dist-info/RECORD,,\n")

    def entry(self) -> dict:
        """What env/assets.yaml would say of it."""
        return {
            "name": "tiny",
            "package": "tinyasset",
            "version": "1.0",
            "file": self.file.name,
            "sha256": hashlib.sha256(self.file.read_bytes()).hexdigest(),
            "bytes": self.file.stat().st_size,
            "licence": "none",
            "members": [
                {
                    "path": "tinyasset/data.gguf",
                    "sha256": hashlib.sha256(self.content).hexdigest(),
                    "bytes": len(self.content),
                    "saved_as": "tiny.gguf",
                }
            ],
        }


@pytest.fixture
def lock_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that makes the lock hold the given entries and nothing else."""

    def write(*entries: dict) -> None:
        (tmp_path / "env").mkdir(exist_ok=True)
        (tmp_path / "env" / "assets.yaml").write_text(yaml.safe_dump(list(entries)))
        (tmp_path / "env" / "brought.yaml").write_text("[]")
        monkeypatch.setattr(paths, "ENV", tmp_path / "env")

    return write


@pytest.fixture
def tiny_wheel(tmp_path: Path, lock_with) -> TinyWheel:
    """A pinned wheel in a folder, not yet fetched."""
    wheel = TinyWheel(tmp_path / "wheels", bytes(range(256)) * 64)
    lock_with(wheel.entry())
    return wheel


@pytest.fixture
def pip_offline(tiny_wheel, monkeypatch):
    """pip without its configuration and its patience, finding wheels in the test's folder only."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "RETRIES": "0", "TIMEOUT": "2"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheel.file.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
