"""How long connections of this process were busy sending, as the kernel counts it. Linux only.

The kernel of the sender knows this, and no clock of another machine is needed. What waits because the receiver has not
read its memory does not count: then the receiver is late, and not the network.
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress

__all__ = ["seconds_sending"]

TCP, INFO = 6, 11  # of getsockopt
# In struct tcp_info of linux/tcp.h: microseconds in which data was on its way, and those limited by the receiver.
BUSY, LIMITED = 168, 176
MOST = 1024  # descriptors


def seconds_sending() -> float:
    """Return the seconds that all TCP connections of this process have spent sending; 0.0 if the kernel cannot tell."""
    total = 0
    with suppress(OSError, AttributeError):
        ask = ctypes.CDLL(None).getsockopt
        info = ctypes.create_string_buffer(LIMITED + 8)
        for name in os.listdir("/proc/self/fd")[:MOST]:
            size = ctypes.c_uint32(len(info))
            # It may have been closed meanwhile, or be no connection: both are an error of the call.
            if ask(int(name), TCP, INFO, info, ctypes.byref(size)) == 0 and size.value == len(info):
                busy, limited = struct.unpack_from("=QQ", info, BUSY)
                total += max(0, busy - limited)
    return total / 1e6
