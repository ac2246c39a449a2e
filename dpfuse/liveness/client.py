"""The heartbeat of the other ranks of a group: it talks to the server, and judges if the server ends or is silent."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

from dpfuse.liveness.connection import Connection, ConnectionEndError
from dpfuse.liveness.diagnosis import MAX_TEXT, SILENT, Diagnosis, End, EndKind, RankState, Status, judge, printable
from dpfuse.liveness.endpoint import Endpoint
from dpfuse.liveness.heartbeat import Heartbeat
from dpfuse.liveness.phase_lines import lines_in

__all__ = ["HeartbeatClient"]

CONNECT_WITHIN = 30.0  # seconds, over all attempts
ATTEMPT = 2.0  # seconds for one
MAX_REPORT = 64 << 10  # bytes


class HeartbeatClient(Heartbeat):
    """Connects to the server, which listens at `endpoint`. Other arguments are those of `Heartbeat`."""

    def __init__(self, endpoint: Endpoint, **others: Any) -> None:
        super().__init__(**others)
        self._endpoint = endpoint
        self._connection: Connection | None = None
        self._heard = monotonic()
        self._server_status: Status | None = None
        self._ends: dict[int, tuple[RankState, float]] = {}  # with the time

    def _connect(self) -> None:
        self._connection = Connection(self._connected(), MAX_REPORT)
        self._heard = monotonic()
        self._selector.register(self._connection.socket, selectors.EVENT_READ, self._receive)
        self._send(["hello", self._endpoint.token, self._rank])

    def _connected(self) -> socket.socket:
        deadline = monotonic() + CONNECT_WITHIN
        while True:
            for address in self._endpoint.addresses:
                if self._requests.stopping:
                    raise OSError("the rank ended before it was connected")
                with suppress(OSError):
                    return socket.create_connection(address, ATTEMPT)
            if monotonic() > deadline:
                addresses = ", ".join(f"{host} port {port}" for host, port in self._endpoint.addresses)
                raise OSError(f"rank 0 cannot be reached at {addresses}; a rank that ends or stalls will not be named")
            sleep(0.1)

    def _send(self, message: Any) -> None:
        if self._connection is not None:
            with suppress(ConnectionEndError):  # `_receive` meets the same error and handles it
                self._connection.send(message)

    def _receive(self, _socket: Any) -> None:
        assert self._connection is not None
        try:
            for message in self._connection.receive():
                self._handle(message)
        except (ConnectionEndError, ValueError) as error:
            self._selector.unregister(self._connection.socket)
            self._connection.close()
            self._connection = None
            if isinstance(error, ConnectionEndError) and error.closed:
                now = monotonic()
                self._note_end(0, End(EndKind.FAILED), RankState(self._server_status, now - self._heard), now)
            elif not isinstance(error.__cause__, OSError):
                raise ConnectionEndError(f"rank 0 sent an invalid message: {error}", closed=False) from error

    def _handle(self, message: Any) -> None:
        now = monotonic()
        match message:
            case ["beat", parts]:
                self._server_status, self._heard = Status.from_message(parts), now
            case ["look", int(phase)]:
                self._send(["seen", phase, lines_in(self._board, phase)])
            case ["finished", int(count)]:
                self._board.finished = count
            case ["fatal", list(ranks), str(text)]:
                self._heard = now
                finding = Diagnosis(True, tuple(int(rank) for rank in ranks), 0.0, printable(text, lines=True))
                self._consequences.act(finding, now)
            case ["end", int(rank), int(kind), str(error), bool(secondary), float(ago), float(silence), parts]:
                last = None if parts is None else Status.from_message(parts)
                end = End(EndKind(kind), printable(error[:MAX_TEXT]), secondary)
                self._note_end(rank, end, RankState(last, silence), now - ago)
            case _:
                raise ValueError("a message has another form")

    def _note_end(self, rank: int, end: End, last: RankState, when: float) -> None:
        if rank not in self._ends:
            self._ends[rank] = (replace(last, end=end), when)
            self._requests.notify()

    def _beat(self, now: float) -> None:
        self._send(["beat", self._own.status.message()])
        sums = self._own_sums()
        if sums:
            self._send(["steps", sums, self._rates.read()])
        server = self._states(now)[0]
        # A server that lives knows more than this rank.
        if self._own.status.waits and (server.end is not None or server.silence >= SILENT):
            finding = judge(self._states(now), whole_job=False)
            if finding is not None:
                self._consequences.act(finding, now)

    def _send_end(self, end: End) -> None:
        self._send(["end", int(end.kind), end.error, end.secondary, self._own.status.message()])

    def _ask_for_ends(self) -> None:
        self._send(["ask"])

    def _discount(self, seconds: float) -> None:
        self._heard = min(monotonic(), self._heard + seconds)  # what was sent meanwhile may have been read already

    def _states(self, now: float) -> dict[int, RankState]:
        states = {
            0: RankState(self._server_status, self._silence(now, self._heard)),
            self._rank: RankState(self._own.status),
        }
        for rank, (one, when) in list(self._ends.items()):
            assert one.end is not None
            states[rank] = replace(one, end=replace(one.end, ago=now - when))
        return states
