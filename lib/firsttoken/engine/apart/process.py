"""A worker process and the only way to it: told and heard, noticed when it ends or says nothing, and ended."""

from __future__ import annotations

import secrets
from contextlib import suppress

import zmq

from firsttoken.engine.apart.nursery import Nursery, WorkerGone
from firsttoken.engine.apart.wire import MOST_BYTES
from firsttoken.study.system.sockets import remove_folder, socket_folder


class WorkerProcess:
    """A worker of ``nursery`` behind a socket of an unguessable name, in a folder that only this user may enter. It
    goes once both ends are connected: whatever ends this process, it leaves no file.

    Raises WorkerGone for one that is not there after ``timeout_s``, and StorageError as :func:`socket_folder`.
    """

    def __init__(self, nursery: Nursery, timeout_s: float) -> None:
        self._nursery = nursery
        self.folder = socket_folder()
        # the process's own context: one that is collected with its socket waits for that socket for ever
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        address = f"ipc://{self.folder}/{secrets.token_hex(8)}"
        self._socket.bind(address)
        try:
            self.pid = nursery.bear(address, timeout_s)
        except BaseException:
            self._give_back()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(nursery.said, zmq.POLLIN)
        try:
            self.receive(timeout_s)  # that it is there: what is sent before is lost
        except BaseException:
            self.close()
            raise
        remove_folder(self.folder)

    def send(self, data: bytes) -> None:
        """Never waits; a message to one that is gone is lost."""
        with suppress(zmq.Again):
            self._socket.send(data, zmq.DONTWAIT)

    def receive(self, timeout_s: float) -> bytes:
        """The next message. Raises WorkerGone when none will come, or has come for ``timeout_s``."""
        ready = dict(self._poller.poll(1000 * timeout_s))
        if self._socket in ready:
            return self._socket.recv()
        if not ready:
            raise WorkerGone(f"the worker has said nothing for {timeout_s:g} s")
        raise WorkerGone(f"the worker {self._nursery.end()}")

    def close(self) -> None:
        """End it, whatever it is about, and wait until it and its socket are gone."""
        if self._nursery.worker:
            self._nursery.end()
        self._give_back()

    def _give_back(self) -> None:
        self._socket.close(linger=0)
        remove_folder(self.folder)
