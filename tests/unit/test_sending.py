"""How long connections of this process were busy sending; `bench.slow_ranks` does it with links that are slow."""

from __future__ import annotations

import socket
import struct
import sys
import time

import pytest

from dpfuse.liveness.sending import BUSY, INFO, LIMITED, TCP, seconds_sending

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell")


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            yield sender, receiver


def test_a_receiver_that_does_not_read_is_no_slow_connection(connection):
    sender, _ = connection
    sender.setblocking(False)
    before = seconds_sending()
    with pytest.raises(BlockingIOError):
        while True:
            sender.send(bytes(1 << 16))
    time.sleep(0.6)
    (busy,) = struct.unpack_from("=Q", sender.getsockopt(TCP, INFO, LIMITED + 8), BUSY)
    assert busy > 0.4e6  # microseconds, in which data was on its way
    assert seconds_sending() - before < 0.4
