"""Files that somebody brings: checked on the way into the cache, and again where they are used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from firsttoken.assets.manual_downloads import bring, downloaded
from firsttoken.study import paths
from firsttoken.study.errors import AssetError

CONTENT = {"a.csv": b"1,2\n", "b.csv": b"3,4\n"}


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pinned pair of files, an empty cache."""
    files = [
        {"name": name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in CONTENT.items()
    ]
    entry = {"name": "pair", "source": "https://example.org/pair", "licence": "MIT", "files": files}
    monkeypatch.setattr(paths, "ENV", tmp_path / "env")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "brought.yaml").write_text(yaml.safe_dump([entry]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "download"
    (home / "pair").mkdir(parents=True)
    for name, content in CONTENT.items():
        (home / "pair" / name).write_bytes(content)
    return home


@pytest.mark.usefixtures("lock")
def test_they_are_copied_and_found(folder: Path, tmp_path: Path) -> None:
    assert bring(folder) == bring(folder / "pair") == ["pair"]
    found = downloaded("pair")
    assert found.parent == tmp_path / "cache" / "assets"
    assert {path.name: path.read_bytes() for path in found.iterdir()} == CONTENT
    assert downloaded(str(folder)) == folder, "a folder of the reader's own"
    assert bring(tmp_path) == []


@pytest.mark.usefixtures("lock")
def test_what_is_missing_or_altered_is_told(folder: Path) -> None:
    with pytest.raises(AssetError, match=r"pair is not in the cache: .*example.org.*fetch --from DIR"):
        downloaded("pair")
    with pytest.raises(AssetError, match=r"there is no pear, and no such files are pinned; known: pair"):
        downloaded("pear")
    with pytest.raises(AssetError, match=r"no folder .*nowhere; name the one that holds the files"):
        bring(folder / "nowhere")
    (folder / "pair" / "b.csv").write_bytes(b"3,5\n")
    with pytest.raises(AssetError, match=r"b.csv is not the pinned file of pair; take it from https://example.org"):
        bring(folder)
    (folder / "pair" / "b.csv").unlink()
    with pytest.raises(AssetError, match=r"has a part of pair and no b.csv; take all of it"):
        bring(folder)
    (folder / "pair" / "b.csv").write_bytes(CONTENT["b.csv"])
    bring(folder)
    (downloaded("pair") / "a.csv").write_bytes(b"9,9\n")
    with pytest.raises(AssetError, match=r"a.csv was altered; bring it again"):
        downloaded("pair")
