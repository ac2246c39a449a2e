"""Where the ranks of a group find their first one: addresses that it listens on, and a secret. Opens listeners only."""

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

__all__ = ["Meeting", "host_name", "open_meeting"]

LOOPBACK = "127.0.0.1"
MAX_ADDRESSES = 4


@dataclass(frozen=True)
class Meeting:
    """What a rank has to know to talk to the first one."""

    token: str  # only who knows it is heard
    places: tuple[tuple[str, int], ...]  # host and port, the likeliest first
    listeners: list[socket.socket] = field(default_factory=list, compare=False)  # on the first rank

    def text(self) -> str:
        """As it travels through the group."""
        return json.dumps([self.token, self.places])

    @classmethod
    def from_text(cls, text: str) -> Meeting:
        """Raises ValueError for a text that is none."""
        try:
            token, places = json.loads(text)
            found = tuple((str(ipaddress.ip_address(host)), int(port)) for host, port in places)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{text!r:.80} names no meeting") from error
        if not isinstance(token, str) or not all(0 < port < 1 << 16 for _, port in found):
            raise ValueError(f"{text!r:.80} names no meeting")
        return cls(token, found[:MAX_ADDRESSES])


def host_name() -> str:
    """Equal on two ranks if one reaches the other by loopback: the same machine, started once, and the same network."""
    facts = [socket.gethostname(), str(uuid.getnode())]
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            facts = [file.read().strip()]
        facts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return hashlib.sha256(" ".join(facts).encode()).hexdigest()[:32]


def open_meeting(*, one_host: bool) -> Meeting:
    """Listen: on loopback only if all ranks are on one host, else on the addresses by which others may reach it.

    Raises:
        OSError: that cannot be done here.
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
    return Meeting(secrets.token_hex(16), tuple(listener.getsockname()[:2] for listener in listeners), listeners)


def _addresses() -> list[str]:
    """This machine's own, the likeliest to be reached from others first."""
    own = interface_addresses()
    wished = os.environ.get("GLOO_SOCKET_IFNAME", "") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    found: list[Any] = [own.get(name.strip()) for name in wished.split(",")]
    master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if master:
        # Its own name for itself where it is the master, else what the master sees of it.
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
