"""A link that is cut is cut for everybody, whenever they connected."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from firsttoken_studies.petals import fleet as fleet_module
from firsttoken_studies.petals.fleet import TcpProxy

PATIENCE_S = 60.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE_S)
        yield made


@pytest.fixture
def proxy(listener) -> Iterator[TcpProxy]:
    made = TcpProxy()
    made.forward_to(listener.getsockname()[1])
    yield made
    made.close()


def connected(proxy: TcpProxy) -> socket.socket:
    host, port = proxy.address.split(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def is_ended(one: socket.socket) -> bool:
    """Whether the other side ends it, by a reset or an orderly end."""
    try:
        return one.recv(1) == b""
    except ConnectionError:
        return True


def test_bytes_pass_until_it_is_cut_and_again_when_healed(proxy, listener) -> None:
    near = connected(proxy)
    far, _ = listener.accept()
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    proxy.cut()
    assert is_ended(near) and is_ended(connected(proxy))
    proxy.heal()
    again = connected(proxy)
    again.sendall(b"y")
    assert listener.accept()[0].recv(1) == b"y"


def test_a_connection_that_is_made_while_the_link_is_cut_does_not_outlive_it(proxy, monkeypatch) -> None:
    connecting, cutting = threading.Event(), threading.Event()
    connect = socket.create_connection

    def slow(address: tuple[str, int]) -> socket.socket:
        connecting.set()
        cutting.wait(1.0)  # the cut has begun, and waits for this or has overlooked it
        return connect(address)

    monkeypatch.setattr(fleet_module.socket, "create_connection", lambda *a: slow(*a) if len(a) == 1 else connect(*a))
    near = connected(proxy)
    assert connecting.wait(PATIENCE_S)
    cut = threading.Thread(target=lambda: (cutting.set(), proxy.cut()))
    cut.start()
    cut.join(PATIENCE_S)
    assert is_ended(near)
