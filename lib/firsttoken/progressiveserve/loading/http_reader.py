"""Files of a data server as a load reads them: ranges by HTTP, resumed where a connection drops.

The standard library only: a worker may read before it imports torch.
"""

from __future__ import annotations

import http.client
import re
import threading
import urllib.parse
from dataclasses import dataclass

from firsttoken.link.shaped import Link
from firsttoken.study.errors import LinkError, ModelError

_TIMEOUT_S = 30.0  # without a single byte
_TOTAL = re.compile(r"bytes (?:\*|\d+-\d+)/(\d+)")


class Remote:
    """The data server at ``address`` ("http://host:port"), with one connection for each thread that reads."""

    def __init__(self, address: str) -> None:
        """Take the address; nothing is asked of the server yet. Raises LinkError for an address that is none."""
        parts = urllib.parse.urlsplit(address)
        try:
            self._endpoint = parts.hostname or "", parts.port or 80
        except ValueError:
            self._endpoint = "", 0
        if parts.scheme != "http" or not self._endpoint[0]:
            raise LinkError(f"{address!r} is no address of a data server; one is like http://127.0.0.1:8009")
        self.address = address
        self._connections: dict[threading.Thread, http.client.HTTPConnection] = {}

    def connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """The calling thread's connection, and whether it is a new one."""
        me = threading.current_thread()
        fresh = me not in self._connections
        if fresh:
            self._connections[me] = http.client.HTTPConnection(*self._endpoint, timeout=_TIMEOUT_S)
        return self._connections[me], fresh

    def drop(self) -> None:
        self._connections.pop(threading.current_thread()).close()

    def close(self) -> None:
        """Close the connections of threads that have ended; one that another load still reads through stays."""
        for thread in [thread for thread in self._connections if not thread.is_alive()]:
            self._connections.pop(thread).close()


@dataclass(frozen=True)
class RemotePath:
    """A folder or file of a data server; ``/`` goes down, as with a Path."""

    server: Remote
    path: str = ""

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.server, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition("/")[2]

    def open(self, size: int) -> RemoteFile:
        """The file, which must have ``size`` bytes; nothing is asked of the server yet."""
        return RemoteFile(self, size)


class RemoteFile:
    """One file of a data server, of ``size`` bytes."""

    def __init__(self, path: RemotePath, size: int) -> None:
        self._path, self._server, self._size = path, path.server, size

    def read_into(self, link: Link, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``. Raises LinkError when the server no longer answers, and ModelError for a
        file that it lacks or that has another length."""
        if buffer:
            link.read_into(self, buffer, offset)

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Bytes of one answer; fewer than asked for where the connection dropped, and the next call resumes there.

        A connection that the server closed while it was idle is made anew once. Raises OSError and ModelError.
        """
        connection, fresh = self._server.connection()
        try:
            return self._request_range(connection, buffer, offset)
        except (http.client.HTTPException, OSError) as error:
            self._server.drop()
            if not fresh:
                return self.read_at(buffer, offset)
            reason = getattr(error, "strerror", None) or error
            raise OSError(f"data server {self._server.address}: {reason}") from error

    def _request_range(self, connection: http.client.HTTPConnection, buffer: memoryview, offset: int) -> int:
        last = offset + len(buffer) - 1
        connection.request("GET", urllib.parse.quote(self._path.path), headers={"Range": f"bytes={offset}-{last}"})
        answer = connection.getresponse()
        self._check(answer)
        done = 0
        while done < len(buffer):
            try:
                got = answer.readinto(buffer[done:])
            except (http.client.HTTPException, OSError):
                if not done:
                    raise
                got = 0
            if not got and not done:
                raise ConnectionError("it hung up")
            if not got:
                self._server.drop()
                break
            done += got
        return done

    def _check(self, answer: http.client.HTTPResponse) -> None:
        """Raises OSError for an answer that is no range, and ModelError where the file is not the one wanted."""
        location = f"on {self._server.address}"
        if answer.status == http.client.NOT_FOUND:
            raise ModelError(f"{self._path.name} is missing {location}; copy it there")
        if answer.status not in (http.client.PARTIAL_CONTENT, http.client.REQUESTED_RANGE_NOT_SATISFIABLE):
            raise OSError(f"it answers {answer.status} {answer.reason}, not with a range")
        match = _TOTAL.fullmatch(answer.headers.get("Content-Range", ""))
        if match is None or int(match[1]) != self._size:
            has = f"{int(match[1]):,}" if match else "an unknown number"
            raise ModelError(f"{self._path.name} has {has} of {self._size:,} bytes {location}; copy it again")

    def close(self) -> None:
        """Nobody reads this file any more."""
        self._server.close()
