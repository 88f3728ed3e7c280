"""Files that somebody brings: checked on the way into the cache, and again where they are used."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from firsttoken.__main__ import main
from firsttoken.assets.manual_downloads import bring, download, downloaded
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
    (tmp_path / "env" / "assets.yaml").write_text("[]")


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
    with pytest.raises(
        AssetError, match=r"pair is not in the cache: run `firsttoken fetch pair`, or .*example.org.*fetch --from DIR"
    ):
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
    with pytest.raises(AssetError, match=r"a.csv was altered; run `firsttoken fetch pair`, or bring it again"):
        downloaded("pair")


class Site(ThreadingHTTPServer):
    """Serves the files of ``CONTENT``, or what a test puts in their place; parts of them where it is asked to."""

    daemon_threads = True

    def __init__(self) -> None:
        self.files, self.ends_after, self.ranges, self.asked = dict(CONTENT), 1 << 20, True, list[str]()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        content, part = self.server.files.get(self.path[1:]), self.headers.get("Range", "")
        self.server.asked.append(f"{self.path[1:]} {part}".strip())
        if content is None:
            self.send_error(404)
            return
        start = int(part.removeprefix("bytes=").removesuffix("-")) if part and self.server.ranges else 0
        self.send_response(206 if start else 200)
        self.end_headers()
        self.wfile.write(content[start : self.server.ends_after])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def site(lock: None) -> Iterator[Site]:
    """The pinned pair, with addresses at which it is served."""
    served = Site()
    path = paths.ENV / "brought.yaml"
    (entry,) = yaml.safe_load(path.read_text())
    for file in entry["files"]:
        file["url"] = served.url(file["name"])
    path.write_text(yaml.safe_dump([entry]))
    yield served
    served.shutdown()
    served.server_close()


def test_they_are_downloaded_by_name_and_not_twice(site: Site) -> None:
    download(["pair"])
    assert {path.name: path.read_bytes() for path in downloaded("pair").iterdir()} == CONTENT
    download(["pair"])
    assert site.asked == ["a.csv", "b.csv"]


@pytest.mark.parametrize("ranges", [True, False], ids=["parts are sent", "only whole files are sent"])
def test_a_download_that_was_cut_off_goes_on(site: Site, ranges: bool) -> None:
    site.ends_after, site.ranges = 2, ranges
    with pytest.raises(AssetError, match=r"it ended after 2 of 4 bytes; run the command again to go on"):
        download(["pair"])
    assert not (paths.CACHE / "assets" / "pair" / "a.csv").exists()
    site.ends_after = 1 << 20
    download(["pair"])
    assert downloaded("pair").joinpath("a.csv").read_bytes() == CONTENT["a.csv"]
    assert site.asked == ["a.csv", "a.csv bytes=2-", "b.csv"]


@pytest.mark.parametrize("content", [b"9,9\n", b"1,2\n and more"], ids=["altered", "too long"])
def test_another_file_at_the_address_is_refused(site: Site, content: bytes) -> None:
    site.files["a.csv"] = content
    with pytest.raises(AssetError, match=r"a.csv is not the pinned file of pair; bring it by hand with .*--from DIR"):
        download(["pair"])
    assert not list((paths.CACHE / "assets" / "pair").iterdir())


def test_an_address_that_does_not_answer_is_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    del site.files["b.csv"]
    assert main(["fetch", "pair"]) == 2
    said = capsys.readouterr().err
    assert "b.csv: cannot be downloaded (Not Found); try again, or bring it by hand" in said and said.count("\n") == 1
    with pytest.raises(AssetError, match=r"no such files are pinned: 'pear'; known: pair"):
        download(["pear"])


@pytest.mark.parametrize("by_hand", [False, True], ids=["through pip", "from a folder"])
@pytest.mark.parametrize("shared", [False, True], ids=["a package a file", "a package of the entry"])
def test_a_member_of_a_package_is_brought_by_name_alone(
    tiny_wheel, pip_offline, by_hand: bool, shared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = tiny_wheel.entry()
    (member,) = entry.pop("members")
    package = {key: entry[key] for key in ("package", "version", "file", "sha256", "bytes")}
    part = {"member": member["path"]} | {key: member[key] for key in ("sha256", "bytes")}
    parts = [{"name": f"data.part{i}", **part, **({} if shared else {"package": package})} for i in range(2)]
    told = {"name": "parts", "source": "a wheel", "licence": "none", "files": parts}
    told |= {"package": package} if shared else {}
    (paths.ENV / "assets.yaml").write_text("[]")
    (paths.ENV / "brought.yaml").write_text(json.dumps([told]))  # YAML as well, without aliases
    assert main(["fetch"]) == 0
    with pytest.raises(AssetError, match=r"parts is not in the cache: run `firsttoken fetch parts`"):
        downloaded("parts")
    assert main(["fetch", "parts", *(["--from", str(tiny_wheel.file.parent)] if by_hand else [])]) == 0
    assert {path.read_bytes() for path in downloaded("parts").iterdir()} == {tiny_wheel.content}
    assert capsys.readouterr().out.count("(tinyasset==1.0), keep 0 MB, none") == 1, "a package comes once"


def test_an_address_is_pinned_for_every_file_that_is_used() -> None:
    for entry in yaml.safe_load((paths.ENV / "brought.yaml").read_text(encoding="utf-8")):
        for file in entry["files"]:
            packed = ("package" in file or "package" in entry) and "member" in file
            assert file.get("url", "").startswith("https://") != packed, file["name"]
