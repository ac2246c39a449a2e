"""Where the first rank of a group listens for the heartbeats of the others: its addresses and a secret token."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import secrets
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dpfuse.job.interfaces import address_towards, interface_addresses, is_own_address

__all__ = ["Endpoint", "host_id", "open_endpoint"]

LOOPBACK = "127.0.0.1"
MAX_ADDRESSES = 4


@dataclass(frozen=True)
class Endpoint:
    """What a rank must know to connect to the first rank."""

    token: str  # the first rank accepts only connections that send it
    addresses: tuple[tuple[str, int], ...]  # host and port, the most likely to work first
    listeners: list[socket.socket] = field(default_factory=list, compare=False)  # on the first rank only

    def text(self) -> str:
        """Return token and addresses as a text that the group can send."""
        return json.dumps([self.token, self.addresses])

    @classmethod
    def from_text(cls, text: str) -> Endpoint:
        """Return the endpoint that a text describes.

        Raises:
            ValueError: the text describes none.
        """
        try:
            token, addresses = json.loads(text)
            found = tuple((str(ipaddress.ip_address(host)), int(port)) for host, port in addresses)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{text!r:.80} describes no endpoint") from error
        if not isinstance(token, str) or not all(0 < port < 1 << 16 for _, port in found):
            raise ValueError(f"{text!r:.80} describes no endpoint")
        return cls(token, found[:MAX_ADDRESSES])


def host_id() -> str:
    """Return a text that is equal on two ranks if loopback connects them: same machine, boot and network namespace."""
    facts = [socket.gethostname(), str(uuid.getnode())]
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            facts = [file.read().strip()]
        facts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return hashlib.sha256(" ".join(facts).encode()).hexdigest()[:32]


def open_endpoint(*, one_host: bool) -> Endpoint:
    """Listen on free ports: on loopback if all ranks are on one host, else on the addresses that other hosts may reach.

    Raises:
        OSError: no address of this machine can be listened on.
    """
    listeners: list[socket.socket] = []
    for address in [LOOPBACK] if one_host else _addresses():
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(128)
            listener.setblocking(False)
        except OSError:
            listener.close()
            continue
        listeners.append(listener)
    if not listeners:
        raise OSError("no address of this machine can be listened on")
    return Endpoint(secrets.token_hex(16), tuple(listener.getsockname()[:2] for listener in listeners), listeners)


def _addresses() -> list[str]:
    """Return this machine's own addresses, the most likely to be reached from other hosts first."""
    own = interface_addresses()
    wished = os.environ.get("GLOO_SOCKET_IFNAME", "") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    found: list[Any] = [own.get(name.strip()) for name in wished.split(",")]
    master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if master:
        # The master's own name resolves to its address. On another host, the address that the master sees is used.
        found += [_own(master), address_towards(master, int(port) if port.isdecimal() else 1)]
    found += [_own(socket.gethostname()), *own.values()]
    usable = [host for host in dict.fromkeys(found) if host and not ipaddress.ip_address(host).is_loopback]
    return usable[:MAX_ADDRESSES]


def _own(name: str) -> str | None:
    with suppress(OSError):
        for *_, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            address = str(place[0])
            if "%" not in address and is_own_address(address):
                return address
    return None
