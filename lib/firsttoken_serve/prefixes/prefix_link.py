"""Stored prefixes over HTTP: one replica serves its store, and another copies what it may read into its own.

A file is believed once its header, its name and the sha256 of each of its tensors agree, and not seen by anybody
before. That finds bytes that were changed on the way; that a peer computed what it says nobody can tell, so copy from
one that you trust. The standard library only, and safetensors files alone are moved.
"""

from __future__ import annotations

import hmac
import http.client
import json
import re
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated

from firsttoken.droidspeak.kvfile import file_name, read_header, read_piece
from firsttoken.droidspeak.store import KVStore
from firsttoken.link.data_server import FileHandler, LinkServer
from firsttoken.link.shaped import Link
from firsttoken.study.errors import CacheError, LinkError, StorageError
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import ParseError
from firsttoken.study.parsing.schema import at_least, digits, parse_as
from firsttoken.study.storage import refusal

LIST = "/prefixes"
PATIENCE_S = 30.0  # without a byte
_FILE = re.compile(r"/prefixes/([0-9a-f]{32})")
_MOST_LISTED = 1 << 24  # bytes of a list; a line of it has 100
_PIECE = 256 << 10


@dataclass(frozen=True)
class Offer:
    """A prefix of ``tokens`` tokens whose file has ``nbytes``; ``model`` is the key of who computed it."""

    key: Annotated[str, digits(32)]
    model: Annotated[str, digits(16)]
    owner: str
    tokens: Annotated[int, at_least(1)]
    nbytes: Annotated[int, at_least(1)]


class _PrefixHandler(FileHandler):
    server: PrefixServer
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        try:
            self._offered = self.server.offered(self.headers.get("Authorization", ""))
        except LinkError as error:
            self.send_error(401, str(error))
            return
        if self.path != LIST:
            super().do_GET()
            return
        body = json.dumps([vars(offer) for offer, _ in self._offered.values()]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def opened(self) -> FileIO | None:
        """Open the prefix of that key; the reader has all of it, even if it is dropped now."""
        key = _FILE.fullmatch(self.path)
        with suppress(OSError, KeyError):  # it went since, or is another's, which is not there
            return self._offered[key.group(1)][1].open("rb", buffering=0) if key else None
        return None


class PrefixServer(LinkServer):
    """Serves the prefixes of ``store`` over ``link`` on ``host`` and ``port`` (0: one that is free).

    Whoever asks reads what has no owner. With one of the ``readers``' tokens, by the owner's name, it reads that
    owner's, too. Raises LinkError where the port cannot be had.
    """

    def __init__(
        self, store: KVStore, link: Link, readers: Mapping[str, str], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        super().__init__(link, _PrefixHandler, host, port)
        self.store, self._readers = store, dict(readers)

    def offered(self, authorization: str) -> dict[str, tuple[Offer, Path]]:
        """The prefixes that a client with this header may read, by key. Raises LinkError for a token that is none."""
        owners = {""}
        if authorization:
            given = authorization.removeprefix("Bearer ").strip().encode()
            readers = [name for name, token in self._readers.items() if hmac.compare_digest(token.encode(), given)]
            if not readers:
                raise LinkError("the token is none of a reader's")
            owners.update(readers)
        self.store.refresh()
        return {
            file.entry.key: (Offer(file.entry.key, model.key, model.owner, file.entry.length, file.nbytes), file.path)
            for file in self.store.files
            if (model := file.entry.model).owner in owners
        }


class PrefixPeer:
    """The server at ``address`` (http://HOST:PORT or HOST:PORT), asked with ``token`` ("" without)."""

    def __init__(self, address: str, token: str = "") -> None:
        self.address = address if "://" in address else f"http://{address}"
        if not re.fullmatch(r"http://[^/?#@\s]+:\d{1,5}", self.address):
            raise LinkError(f"{address[:80]!r} is no address of a server of prefixes, such as 127.0.0.1:8010")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def offers(self) -> list[Offer]:
        """Return the prefixes that may be read there. Raises LinkError where nobody answers, or with no such list."""
        with self._opened(LIST) as answer:
            body = answer.read(_MOST_LISTED + 1)
        try:
            if len(body) > _MOST_LISTED:
                raise ParseError(f"it has more than {_MOST_LISTED:,} bytes")
            return list(parse_as(tuple[Offer, ...], parse_json(body)))
        except ValueError as error:
            raise LinkError(f"{self.address} does not answer as a server of prefixes: {error}") from error

    def fetch(self, offer: Offer, folder: Path) -> int:
        """Bring the file of ``offer`` into ``folder``, whole and with all hashes right, or not at all; its bytes.

        Raises LinkError for one that is none of what was offered, and StorageError for a disk that is full.
        """
        # The temporary name is none of a KV file's. The file's own name is held against what it says, so it is checked
        # in a folder of its own.
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".pull-") as work:
                path = Path(work) / file_name(offer.key)
                self._copy(offer, path)
                try:
                    _check(offer, path)
                except CacheError as error:
                    raise LinkError(f"{self.address} sent prefix {offer.key}, which is not kept: {error}") from error
                path.chmod(0o644)
                path.replace(folder / path.name)
        except OSError as error:
            if (reason := refusal(error, folder)) is None:
                raise LinkError(f"prefix {offer.key} was not copied: {error}") from error
            raise StorageError(reason) from error
        return offer.nbytes

    def _copy(self, offer: Offer, path: Path) -> None:
        with self._opened(f"{LIST}/{offer.key}") as answer, path.open("wb") as file:
            if answer.length != offer.nbytes:
                raise LinkError(f"{self.address} offered {offer.nbytes:,} bytes of {offer.key}, and has others")
            try:
                shutil.copyfileobj(answer, file, _PIECE)
            except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
                raise LinkError(f"{self.address} broke off in prefix {offer.key}: {error}") from error

    def _opened(self, path: str) -> http.client.HTTPResponse:
        request = urllib.request.Request(self.address + path, headers=self._headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
        try:
            return opener.open(request, timeout=PATIENCE_S)
        except urllib.error.HTTPError as error:
            reason = {401: "it does not know the token", 404: "the prefix is gone"}.get(
                error.code, f"status {error.code}"
            )
            raise LinkError(f"{self.address}: {reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LinkError(f"no prefixes from {self.address}: {getattr(error, 'reason', error)}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """A server that sends its readers elsewhere is not followed."""


def _check(offer: Offer, path: Path) -> None:
    """Raises CacheError for a file whose name, header or hashes are not right, or of another model or owner."""
    if path.stat().st_size != offer.nbytes:
        raise CacheError(f"it has {path.stat().st_size:,} bytes, and {offer.nbytes:,} were offered")
    file = read_header(path)
    model = file.entry.model
    if (model.key, model.owner, file.entry.length) != (offer.model, offer.owner, offer.tokens):
        raise CacheError("it is of another model, owner or length than was offered")
    with path.open("rb") as opened:
        for span in file.spans.values():
            read_piece(opened.fileno(), span)


def pull(peer: PrefixPeer, store: Path, most_bytes: int) -> tuple[list[Offer], list[str]]:
    """Copy what ``peer`` offers and ``store`` lacks, as long as all of the store has at most ``most_bytes``; what was
    copied, and why others were not. Raises LinkError where the peer does not answer, and StorageError."""
    store.mkdir(parents=True, exist_ok=True)
    held = KVStore(store, memory_bytes=0, disk_bytes=sys.maxsize)  # which drops nothing
    used, present = held.used[1], {file.entry.key for file in held.files}
    copied, skipped = [], []
    for offer in peer.offers():
        if offer.key in present:
            continue
        if used + offer.nbytes > most_bytes:
            room = max(0, most_bytes - used)
            skipped.append(f"{offer.key} has {offer.nbytes:,} bytes, and the store has room for {room:,}")
            continue
        try:
            used += peer.fetch(offer, store)
            copied.append(offer)
        except LinkError as error:  # the others may be right
            skipped.append(str(error))
    return copied, skipped
