"""The heartbeat of a group's first rank: it hears all others, judges, and passes on what they need to know."""

from __future__ import annotations

import hmac
import logging
import selectors
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

from dpfuse.comm.step_clock import NAMES
from dpfuse.liveness.connection import MAX_LINE, Connection, ConnectionEndError
from dpfuse.liveness.diagnosis import MAX_TEXT, End, EndKind, RankState, Status, judge, printable
from dpfuse.liveness.endpoint import Endpoint
from dpfuse.liveness.heartbeat import Heartbeat
from dpfuse.liveness.late_ranks import LateRanks
from dpfuse.liveness.phase_lines import PhaseLines, lines_in

__all__ = ["HeartbeatServer"]

log = logging.getLogger("dpfuse.slow")

MAX_UNKNOWN = 64  # connections that have not authenticated, beside one for each rank
AUTHENTICATE_WITHIN = 5.0  # seconds
MAX_GREETING = 256  # bytes
MAX_FAILURES = 8  # of which all ranks are told at once; the first ones explain the rest


class _Peer:
    """One other rank."""

    def __init__(self, connection: Connection, now: float) -> None:
        self.connection: Connection | None = connection
        self.status: Status | None = Status()
        self.heard = now
        self.end: End | None = None
        self.ended = 0.0  # when
        self.asks = False  # whether it wants to know of every end
        self.finished = 0  # sections of the first rank, of whose end it was told


class HeartbeatServer(Heartbeat):
    """Accepts the connections of the other ranks.

    It owns the listeners of `endpoint` from now on. Other arguments are those of `Heartbeat`.
    """

    def __init__(self, size: int, endpoint: Endpoint, **others: Any) -> None:
        super().__init__(size=size, **others)
        self._size = size
        self._token = endpoint.token.encode()
        self._listeners = endpoint.listeners
        self._unknown: dict[Connection, float] = {}  # connections, with the time until which they may authenticate
        self._peers: dict[int, _Peer] = {}
        self._failures = 0
        self._late: LateRanks | None = LateRanks(size)  # until judging has failed
        self._lines: PhaseLines | None = None  # at the ranks, after one was found to be late

    def _connect(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self, listener: Any) -> None:
        try:
            connected, _ = listener.accept()
        except OSError:  # the caller has hung up already, or this process may open no more files
            return
        if len(self._unknown) >= MAX_UNKNOWN + self._size:
            connected.close()
            return
        connection = Connection(connected, MAX_GREETING)
        self._unknown[connection] = monotonic() + AUTHENTICATE_WITHIN
        self._selector.register(connection.socket, selectors.EVENT_READ, lambda _: self._authenticate(connection))

    def _authenticate(self, connection: Connection) -> None:
        """Accept a connection whose first message has the token and a rank that is missing; else close it."""
        try:
            messages = connection.receive()
        except ConnectionEndError:
            self._reject(connection)
            return
        if not messages:
            return
        greeting = messages[0]
        if not isinstance(greeting, list) or len(greeting) != 3 or greeting[0] != "hello":
            self._reject(connection)
            return
        _, token, rank = greeting
        known = isinstance(token, str) and hmac.compare_digest(token.encode(errors="replace"), self._token)
        if not known or type(rank) is not int or not 0 < rank < self._size or rank in self._peers:
            self._reject(connection)
            return
        del self._unknown[connection]
        connection.max_line = MAX_LINE
        peer = self._peers[rank] = _Peer(connection, monotonic())
        self._selector.modify(connection.socket, selectors.EVENT_READ, lambda _: self._receive(rank, peer))
        self._handle(rank, peer, messages[1:])

    def _reject(self, connection: Connection) -> None:
        self._unknown.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.close()

    def _receive(self, rank: int, peer: _Peer) -> None:
        assert peer.connection is not None
        try:
            self._handle(rank, peer, peer.connection.receive())
        except ConnectionEndError as error:
            self._disconnect(rank, peer, error)

    def _handle(self, rank: int, peer: _Peer, messages: list[Any]) -> None:
        """Handle the messages of a rank; a message of another form ends its connection."""
        for message in messages:
            try:
                match message:
                    case ["beat", parts]:
                        status = Status.from_message(parts)
                        if peer.end is None:  # a rank that has left its group goes on beating
                            peer.status, peer.heard = status, monotonic()
                    case ["steps", list(sums), list(rates)]:
                        if self._late is not None:
                            self._late.add(rank, sums, rates)
                    case ["seen", int(phase), dict(seen)]:
                        if self._lines is not None and phase == self._lines.phase:
                            self._lines.add(rank, seen)
                    case ["ask"]:
                        peer.asks = True
                        for other, one in list(self._peers.items()):
                            if one.end is not None:
                                self._send(peer, _end_message(other, one, one.end, one.ended))
                    case ["end", int(kind), str(error), bool(secondary), parts] if len(error) <= MAX_TEXT:
                        peer.status, peer.heard = Status.from_message(parts), monotonic()
                        self._note_end(rank, peer, End(EndKind(kind), printable(error), secondary))
                    case _:
                        raise ValueError("a message has another form")
            except ValueError as error:
                self._disconnect(rank, peer, ConnectionEndError(str(error), closed=False))
                return

    def _disconnect(self, rank: int, peer: _Peer, error: ConnectionEndError) -> None:
        """Close the connection of a rank. The rank has ended if it closed the connection itself."""
        if peer.connection is not None:
            self._selector.unregister(peer.connection.socket)
            peer.connection.close()
            peer.connection = None
        if peer.end is not None:
            return
        if error.closed:
            self._note_end(rank, peer, End(EndKind.FAILED))
        elif not isinstance(error.__cause__, OSError):
            peer.status = None  # it sent an invalid message: nothing is known of it, and it is never called silent

    def _note_end(self, rank: int, peer: _Peer, end: End) -> None:
        if peer.end is not None:
            return
        ended = monotonic()
        message = _end_message(rank, peer, end, ended)
        self._failures += end.failed
        for other in list(self._peers.values()):
            if other.asks or (end.failed and self._failures <= MAX_FAILURES):
                self._send(other, message)
        # Last: once the thread that trains knows of it, it may end this process, and the others would not know why.
        peer.ended, peer.end = ended, end
        self._requests.notify()

    def _send(self, peer: _Peer, message: Any) -> None:
        if peer.connection is not None:
            with suppress(ConnectionEndError):  # `_receive` meets the same error and handles it
                peer.connection.send(message)

    def _beat(self, now: float) -> None:
        for connection, until in list(self._unknown.items()):
            if now > until:
                self._reject(connection)
        beat = ["beat", self._own.status.message()]
        finding = None
        if self._own.status.waits or any(one.status is not None and one.status.waits for one in self._peers.values()):
            finding = judge(self._states(now), whole_job=self._whole_job)
        for peer in list(self._peers.values()):
            self._send(peer, beat)
            self._send_finished(peer)
            if finding is not None and finding.fatal:
                self._send(peer, ["fatal", list(finding.ranks[:MAX_FAILURES]), finding.text[:8000]])
        if finding is not None:
            self._consequences.act(finding, now)
        if self._board.clock is not None and self._late is not None:
            try:
                self._judge_steps(self._late)
            except Exception as error:  # the heartbeat is worth more, and goes on
                self._late, self._lines, self._board.late = None, None, {}
                text = f"slow ranks are not looked for any more: {type(error).__name__}: {error}"
                log.info("%s", text, extra={"rank": 0})

    def _judge_steps(self, ranks: LateRanks) -> None:
        """Log which ranks are late in each step, when that begins and when it ends."""
        ranks.add(0, self._own_sums(), self._rates.read())
        changes, late = ranks.judge(), ranks.late
        for change in changes:
            log.info("%s", change, extra={"rank": 0})
        self._board.late = ranks.numbers()
        if late is not None and str(late) in changes:
            self._lines = PhaseLines(NAMES.index(late.phases[0]), late.ranks, self._size)
            for peer in list(self._peers.values()):
                self._send(peer, ["look", self._lines.phase])
            self._lines.add(0, lines_in(self._board, self._lines.phase))
        elif self._lines is not None and self._lines.is_complete():
            lines, self._lines = str(self._lines), None
            if lines:
                log.info("%s", lines, extra={"rank": 0})

    def _send_end(self, end: End) -> None:
        message = ["end", 0, int(end.kind), end.error, end.secondary, 0.0, 0.0, self._own.status.message()]
        for peer in list(self._peers.values()):
            self._send_finished(peer)  # else a rank would wait for what is done
            self._send(peer, message)

    def _send_finished(self, peer: _Peer) -> None:
        finished = self._board.finished
        if finished != peer.finished:
            peer.finished = finished
            self._send(peer, ["finished", finished])

    def _discount(self, seconds: float) -> None:
        now = monotonic()
        for peer in self._peers.values():
            peer.heard = min(now, peer.heard + seconds)  # what was sent meanwhile may have been read already

    def _states(self, now: float) -> dict[int, RankState]:
        states = {rank: RankState() for rank in range(self._size)}
        states[0] = RankState(self._own.status, end=self._requests.own_end(now))
        for rank, peer in list(self._peers.items()):
            if peer.end is None:
                states[rank] = RankState(peer.status, self._silence(now, peer.heard))
            else:
                end = replace(peer.end, ago=now - peer.ended)
                states[rank] = RankState(peer.status, peer.ended - peer.heard, end)
        return states


def _end_message(rank: int, peer: _Peer, end: End, ended: float) -> list[Any]:
    status = None if peer.status is None else peer.status.message()
    times = [round(monotonic() - ended, 2), round(ended - peer.heard, 2)]
    return ["end", rank, int(end.kind), end.error, end.secondary, *times, status]
