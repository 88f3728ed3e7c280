"""Addresses of members, as they are compared: a server has one, however it is spelled, and each swarm has its kind."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import unquote

from firsttoken.study.errors import SwarmError

MOST_CHARACTERS = 256


def fault_of(address: str) -> str:
    """Return what is wrong with ``address`` as HOST:PORT, "" for nothing. Names are ASCII, and no port is 0."""
    host, colon, port = address.rpartition(":")
    good = host and colon and port.isascii() and port.isdecimal() and len(address) <= MOST_CHARACTERS
    good = good and address.isascii() and address.isprintable() and " " not in address
    return "" if good and 0 < int(port) < 1 << 16 else "expected HOST:PORT"


def host_of(address: str) -> str:
    """Return the host of HOST:PORT, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Return whether ``host`` names this machine's loopback; names other than localhost are not looked up."""
    return host == "localhost" or ((ip := ip_of(host)) is not None and ip.is_loopback)


def spot_of(address: str) -> str:
    """One text for each place that ``address`` may name: all ways to write an IP, and all of loopback, are one host."""
    host, port = host_of(address), address.rpartition(":")[2]
    name = "loopback" if is_loopback(host) else str(ip_of(host) or host.rstrip(".").lower())
    return f"{name}:{int(port) if port.isdecimal() else port}"


def network_of(address: str) -> str:
    """The host of ``address`` with its neighbours (/24 of IPv4, /48 of IPv6), all of which one person may hold."""
    host = spot_of(address).rpartition(":")[0]
    ip = ip_of(host)
    if ip is None:
        return host
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


def source_of(peer: str) -> str:
    """The source that gRPC's ``peer`` (ipv4:HOST:PORT) counts as: a machine, or on loopback one of its connections."""
    address = unquote(peer).partition(":")[2]
    return address if is_loopback(host_of(address)) else network_of(address)


def check_kind(address: str, near: bool, far: bool) -> None:
    """Raise SwarmError unless ``address`` is one that this swarm's servers can have: loopback in one that is ``near``,
    other machines in one that is ``far``, and no address that is of no machine."""
    if fault_of(address):
        raise SwarmError(f"{address[:MOST_CHARACTERS]!r} is no address of a server: {fault_of(address)}")
    host = host_of(address)
    ip = ip_of(host)
    if is_loopback(host):
        if not near:
            raise SwarmError(f"{address} is loopback, and this swarm has other machines: name another address")
    elif ip is not None and (ip.is_unspecified or ip.is_multicast or ip.is_link_local or ip.is_reserved):
        raise SwarmError(f"{address} is the address of no server: name the one that others reach it by")
    elif not far:
        raise SwarmError(f"{address} is on another machine, and this swarm has no TLS: give --tls-ca and --token-file")


async def check_name(address: str) -> None:
    """Raise SwarmError for a host name that stands for no address, or for loopback or an address of no machine.

    A name may lead anywhere, whoever gave it: it is looked up before anybody connects.
    """
    host, port = host_of(address), address.rpartition(":")[2]
    if ip_of(host) is not None or host == "localhost":
        return
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise SwarmError(f"{host} is the name of no machine: {error.strerror or error}") from error
    for *_, sockaddr in addresses:
        try:
            check_kind(f"[{sockaddr[0]}]:{port}", near=False, far=True)
        except SwarmError as error:
            raise SwarmError(f"{host} leads to {sockaddr[0]}: {error}") from error


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return ``host`` as an IP, as IPv4 one that stands in an IPv6 address; None for a name."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
