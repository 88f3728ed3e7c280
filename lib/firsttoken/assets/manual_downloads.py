"""Files that no package index has and the repository may not hold: somebody brings them, and they are checked here.

``env/brought.yaml`` says what each is, where it is published and under which licence, and pins it by hash.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from firsttoken.assets.lock import file_sha256
from firsttoken.study import paths
from firsttoken.study.errors import AssetError
from firsttoken.study.files import replacing
from firsttoken.study.parsing.parse_errors import blaming
from firsttoken.study.parsing.schema import at_least, digits, plain_name, shaped, some
from firsttoken.study.parsing.yaml_text import read_yaml


def bring(folder: str | Path) -> list[str]:
    """Copy what ``folder`` has of the pinned files into the cache; the names of what is whole there now.

    A file lies in the folder itself, or in one named as its entry. Raises AssetError for a folder that is not there, a
    file of a pinned name whose content is another, and an entry of which a part is missing.
    """
    if not Path(folder).is_dir():
        raise AssetError(f"no folder {folder}; name the one that holds the files")
    whole = []
    for name, entry in _lock().items():
        found = {file.name: _found(Path(folder), name, file.name) for file in entry.files}
        if not any(found.values()):
            continue
        for file in entry.files:
            source = found[file.name]
            if source is None:
                raise AssetError(f"{folder} has a part of {name} and no {file.name}; take all of it: {_where(entry)}")
            if file_sha256(source) != file.sha256:
                raise AssetError(f"{source} is not the pinned file of {name}; take it from {_where(entry)}")
            with replacing(_target(name) / file.name) as partial:
                shutil.copyfile(source, partial)
        whole.append(name)
    return whole


def downloaded(name: str) -> Path:
    """The folder of the files called ``name``: pinned ones in the cache, checked, or a path of the reader's own.

    Raises AssetError when it is neither, or a pinned file is absent or altered.
    """
    if (entry := _lock().get(name)) is None:
        if (path := paths.expanded(name)).exists():
            return path
        raise AssetError(f"there is no {name}, and no such files are pinned; known: {', '.join(_lock())}")
    for file in entry.files:
        path = _target(name) / file.name
        if not path.is_file():
            raise AssetError(
                f"{name} is not in the cache: put its files into a folder DIR, from {_where(entry)}, and run "
                "`firsttoken fetch --from DIR`"
            )
        if file_sha256(path) != file.sha256:
            raise AssetError(f"{path} was altered; bring it again with `firsttoken fetch --from DIR`")
    return _target(name)


@dataclass(frozen=True)
class _DownloadedFile:
    name: Annotated[str, plain_name]
    sha256: Annotated[str, digits(64)]
    bytes: Annotated[int, at_least(0)]


@dataclass(frozen=True)
class _DownloadedAsset:
    name: Annotated[str, plain_name]
    source: str
    licence: str
    files: Annotated[tuple[_DownloadedFile, ...], some]


def _lock() -> dict[str, _DownloadedAsset]:
    path = paths.ENV / "brought.yaml"
    with blaming(f"the lock {path}", AssetError, "restore it from git"):
        return {entry.name: entry for entry in shaped(tuple[_DownloadedAsset, ...], read_yaml(path))}


def _found(folder: Path, name: str, file: str) -> Path | None:
    return next((path for path in (folder / name / file, folder / file) if path.is_file()), None)


def _target(name: str) -> Path:
    return paths.CACHE / "assets" / name


def _where(entry: _DownloadedAsset) -> str:
    return f"{entry.source} ({entry.licence})"
