"""How fast connections of this process deliver, as the kernel counts it. Linux only.

The kernel of the sender measures this while data is on its way. No clock of another machine is needed, and no message.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress

__all__ = ["DeliveryRates"]

TCP, INFO = 6, 11  # of getsockopt
# In struct tcp_info of linux/tcp.h: bytes that were acknowledged, and bytes per second of the newest delivery.
ACKNOWLEDGED, RATE = 120, 160
MOST = 1024  # descriptors
MOST_PAIRS = 32  # of machines
LEAST = 1 << 16  # bytes between two calls; the rate of a few bytes says little


class DeliveryRates:
    """Reads the rates of all TCP connections of this process to other machines.

    Example:
        >>> DeliveryRates().read()  # no connection has sent anything since an earlier call
        []
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[int, object], int] = {}  # by descriptor and own end: bytes so far

    def read(self) -> list[tuple[str, str, float]]:
        """Return the rates of the connections that have sent something since the last call.

        Returns:
            Own address, address of the peer, and bytes per second of the connection between them that has sent most.
            The pairs that have sent most come first; a process with very many peers tells no more. Connections inside
            a machine are left out. Nothing if the kernel cannot tell.
        """
        before, self._sent = self._sent, {}
        found: dict[tuple[str, str], tuple[int, float]] = {}
        with suppress(OSError, AttributeError):
            ask = ctypes.CDLL(None).getsockopt
            info = ctypes.create_string_buffer(RATE + 8)
            for name in map(int, os.listdir("/proc/self/fd")[:MOST]):
                size = ctypes.c_uint32(len(info))
                # It may have been closed meanwhile, or be no connection: both are an error of the call.
                if ask(name, TCP, INFO, info, ctypes.byref(size)) == 0 and size.value == len(info):
                    self._add(name, info.raw, before, found)
        most = sorted(found, key=found.__getitem__, reverse=True)[:MOST_PAIRS]
        return [(own, peer, found[own, peer][1]) for own, peer in most]

    def _add(
        self,
        descriptor: int,
        info: bytes,
        before: dict[tuple[int, object], int],
        found: dict[tuple[str, str], tuple[int, float]],
    ) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            own, peer = connection.getsockname(), connection.getpeername()
            if own[0] == peer[0]:
                return
            (sent,), (rate,) = struct.unpack_from("=Q", info, ACKNOWLEDGED), struct.unpack_from("=Q", info, RATE)
            key = descriptor, own
            self._sent[key] = sent
            new = sent - before.get(key, sent)
            pair = str(own[0]), str(peer[0])
            if new >= LEAST and new > found.get(pair, (0, 0.0))[0]:
                found[pair] = new, float(rate)
