"""A data server: the files of one folder by HTTP range requests, over a link of a given rate (ProgressiveServe, 3.5.1).

The report's compute server reads its checkpoints from a data server over NFS; this is the same split, and needs no
mount. The rate is one for all connections together and set where the bytes leave, so every client is held to it. It
serves to this machine alone unless ``--host`` says otherwise, and only what lies in the folder:

    python -m firsttoken.link.data_server FOLDER --gbit-per-s 1 --port 8009

prints its address as one line when it is ready. The standard library only.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.parse
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import FileIO
from pathlib import Path
from typing import Any

from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.study.command_line import CommandLine
from firsttoken.study.errors import LinkError

_PIECE = 256 << 10  # read, then sent: about one turn of a link of 1 Gbit/s
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")  # no file has more bytes than 18 digits count


class DataServer(ThreadingHTTPServer):
    """A server of the files in ``folder``, which it sends over ``link``, on ``host`` and ``port`` (0: one that is
    free)."""

    daemon_threads = True

    def __init__(self, folder: Path, link: Link, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises LinkError where there is no such folder or the port cannot be had."""
        self.folder, self.link = folder.resolve(), link
        if not self.folder.is_dir():
            raise LinkError(f"{folder} is no folder; name one to serve")
        try:
            super().__init__((host, port), _FolderHandler)
        except OSError as error:
            raise LinkError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from error

    @property
    def address(self) -> str:
        """Return the URL at which clients reach the server."""
        return f"http://{self.server_address[0]}:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hangs up in the middle, which is nobody's error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _FolderHandler(BaseHTTPRequestHandler):
    """Sends the file that the path of a request names, or a range of it."""

    server: DataServer
    protocol_version = "HTTP/1.1"  # a reader keeps its connection from chunk to chunk
    disable_nagle_algorithm = True  # head and body are two writes

    def log_message(self, *_: object) -> None:
        """Log nothing: a line for every chunk would be thousands."""

    def _opened(self) -> FileIO | None:
        """The file that the path names; None where the folder has none of this name that can be read."""
        try:
            name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")
            path = (self.server.folder / name.replace("\0", "")).resolve()
            inside = path.is_relative_to(self.server.folder) and path.is_file()
            return path.open("rb", buffering=0) if inside else None
        except (OSError, ValueError, RuntimeError):  # no address, a name that no file can have, links in a circle
            return None

    def do_GET(self) -> None:
        """Send the file over the link, or answer that it is not there."""
        if (file := self._opened()) is None:
            self.send_error(404)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            status, begin, end = byte_range(self.headers.get("Range"), size)
            self.send_response(status)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(end - begin))
            if status != 200:
                self.send_header("Content-Range", f"bytes {f'{begin}-{end - 1}' if end else '*'}/{size}")
            self.end_headers()
            buffer = memoryview(bytearray(min(_PIECE, end - begin)))
            try:
                for offset in range(begin, end, _PIECE):
                    piece = buffer[: min(_PIECE, end - offset)]
                    self.server.link.read_into(file.fileno(), piece, offset)
                    self.wfile.write(piece)
            except (OSError, LinkError):  # the reader has gone, or the file was cut: hang up
                self.close_connection = True


def byte_range(header: str | None, size: int) -> tuple[int, int, int]:
    """Status, begin and end (exclusive) of what a Range header asks of ``size`` bytes: 206, or 416 and (0, 0).

    200 and the whole file without a header, and for one that is malformed or names several ranges, as RFC 9110 (14.2)
    allows.
    """
    match = _RANGE.fullmatch((header or "").strip())
    first, last = match.groups() if match else ("", "")
    if (not first and not last) or (first and last and int(last) < int(first)):
        return 200, 0, size
    begin = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    return (206, begin, end) if begin < end else (416, 0, 0)


def main() -> None:
    """Run the command; ends with one line where it cannot serve."""
    parser = CommandLine(prog="python -m firsttoken.link.data_server", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder whose files are served")
    rate = "the rate of all connections together in Gbit/s (default: 0, no limit)"
    parser.add_argument("--gbit-per-s", type=float, default=0.0, help=rate)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="the port to listen on (default: 0, any free port)")
    options = parser.parse_args()
    try:
        server = DataServer(options.folder, Link(LinkConfig(options.gbit_per_s)), options.host, options.port)
    except LinkError as error:
        parser.exit(1, f"{error}\n")
    print(server.address, flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
