"""How fast connections of this process deliver; `bench.slow_ranks` does it with links that are slow."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from time import sleep

import pytest

from dpfuse.liveness.delivery_rates import ACKNOWLEDGED, INFO, LEAST, RATE, TCP, DeliveryRates

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell")
OWN, PEER = "127.0.0.2", "127.0.0.1"


@pytest.fixture
def connection(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A connection whose other end reads all that comes."""
    with socket.create_server((PEER, 0)) as server:
        own = socket.create_connection(server.getsockname(), source_address=(getattr(request, "param", OWN), 0))
        peer, _ = server.accept()
        reader = threading.Thread(target=lambda: [None for _ in iter(lambda: peer.recv(1 << 16), b"")], daemon=True)
        reader.start()
        with peer, own:
            yield own
            own.shutdown(socket.SHUT_WR)
            reader.join()


def told(rates: DeliveryRates) -> list[float]:
    return [rate for *ends, rate in rates.read() if ends == [OWN, PEER]]


def send(connection: socket.socket, count: int) -> None:
    """Send so many bytes, and return when they are acknowledged."""
    before = acknowledged(connection)
    connection.sendall(bytes(count))
    while acknowledged(connection) < before + count:
        sleep(0.01)


def acknowledged(connection: socket.socket) -> int:
    (count,) = struct.unpack_from("=Q", connection.getsockopt(TCP, INFO, RATE), ACKNOWLEDGED)
    return int(count)


def test_a_connection_that_has_sent_something_since_the_last_call_has_a_rate(connection: socket.socket) -> None:
    rates = DeliveryRates()
    rates.read()
    for _ in range(2):
        send(connection, 8 * LEAST)
        (rate,) = told(rates)
        assert 1e5 < rate < 1e13
    assert told(rates) == [], "nothing was sent"
    send(connection, LEAST - 1)
    assert told(rates) == []


def test_a_connection_that_is_new_says_nothing_yet(connection: socket.socket) -> None:
    send(connection, 8 * LEAST)
    assert told(DeliveryRates()) == []


@pytest.mark.parametrize("connection", [PEER], indirect=True)
def test_connections_inside_a_machine_are_left_out(connection: socket.socket) -> None:
    rates = DeliveryRates()
    rates.read()
    send(connection, 8 * LEAST)
    assert [ends for *ends, _ in rates.read() if ends == [PEER, PEER]] == []


def test_reading_takes_no_descriptor(connection: socket.socket) -> None:
    rates, before = DeliveryRates(), os.listdir("/proc/self/fd")
    rates.read()
    assert os.listdir("/proc/self/fd") == before
