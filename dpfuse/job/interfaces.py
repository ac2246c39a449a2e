"""Network addresses: of this machine, of its interfaces, and public ones. Opens no connection."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys

__all__ = ["address_towards", "interface_addresses", "interface_of", "is_own_address", "public_address"]

SIOCGIFADDR = 0x8915  # from linux/sockios.h


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one. Linux only; empty elsewhere."""
    found = {}
    if sys.platform.startswith("linux"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(address: str) -> str | None:
    """Return the interface that has an IPv4 address; None if no interface of this machine has it."""
    return next((name for name, own in interface_addresses().items() if own == address), None)


def is_own_address(address: str) -> bool:
    """Whether an IP address is one of this machine; only these can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(host: str, port: int) -> str | None:
    """Return the address from which this machine reaches `host`; None if the name or the route is unknown."""
    try:
        family, kind, protocol, _, peer = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(peer)  # chooses a route; a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    except OSError:
        return None


def public_address(host: str) -> str | None:
    """Return the address of `host` that is public; None if it has none, or if the name is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = [str(place[0]).partition("%")[0] for *_, place in found]
    return next((address for address in addresses if ipaddress.ip_address(address).is_global), None)
