"""The heartbeat of a group's first rank: hears all others, judges, and passes on what they need to know."""

from __future__ import annotations

import hmac
import selectors
import socket
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

from dpfuse.liveness.diagnosis import MAX_TEXT, End, EndKind, Seen, Status, clean, judge
from dpfuse.liveness.heartbeat import Heartbeat
from dpfuse.liveness.line import Line, LineError
from dpfuse.liveness.meeting import Meeting

__all__ = ["Hub"]

STRANGERS = 64  # connections that have not said who they are, beside one for each rank
INTRODUCE_WITHIN = 5.0  # seconds
MAX_GREETING = 256  # bytes
MAX_DEATHS = 8  # of which all ranks are told at once; of more a job does not need to know


class _Peer:
    """One other rank."""

    def __init__(self, line: Line, now: float) -> None:
        self.line: Line | None = line
        self.status: Status | None = Status()
        self.heard = now
        self.end: End | None = None
        self.ended = 0.0  # when
        self.asks = False  # whether it wants to know of every end


class Hub(Heartbeat):
    """Listens where the others expect it.

    Args:
        size: number of ranks.
        meeting: with its listeners, which are the hub's from now on.
        **others: as for `Heartbeat`.
    """

    def __init__(self, size: int, meeting: Meeting, **others: Any) -> None:
        super().__init__(size=size, **others)
        self._size = size
        self._token = meeting.token.encode()
        self._listeners = meeting.listeners
        self._strangers: dict[Line, float] = {}  # until when they may introduce themselves
        self._peers: dict[int, _Peer] = {}
        self._deaths = 0

    def _begin(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self, listener: Any) -> None:
        with suppress(OSError):  # the caller has hung up already, or this process may open no more
            connected, _ = listener.accept()
            self._take_in(connected)

    def _take_in(self, connected: socket.socket) -> None:
        if len(self._strangers) >= STRANGERS + self._size:
            connected.close()
            return
        line = Line(connected, MAX_GREETING)
        self._strangers[line] = monotonic() + INTRODUCE_WITHIN
        self._selector.register(line.socket, selectors.EVENT_READ, lambda _: self._meet(line))

    def _meet(self, line: Line) -> None:
        """A stranger has said something: who it is, or nothing that concerns us."""
        try:
            messages = line.receive()
        except LineError:
            self._turn_away(line)
            return
        if not messages:
            return
        greeting = messages[0]
        if not isinstance(greeting, list) or len(greeting) != 3 or greeting[0] != "hello":
            self._turn_away(line)
            return
        _, token, rank = greeting
        known = isinstance(token, str) and hmac.compare_digest(token.encode(errors="replace"), self._token)
        if not known or type(rank) is not int or not 0 < rank < self._size or rank in self._peers:
            self._turn_away(line)
            return
        del self._strangers[line]
        line.max_line = 16 << 10
        peer = self._peers[rank] = _Peer(line, monotonic())
        self._selector.modify(line.socket, selectors.EVENT_READ, lambda _: self._hear(rank, peer))
        self._follow(rank, peer, messages[1:])

    def _turn_away(self, line: Line) -> None:
        self._strangers.pop(line, None)
        self._selector.unregister(line.socket)
        line.close()

    def _hear(self, rank: int, peer: _Peer) -> None:
        assert peer.line is not None
        try:
            self._follow(rank, peer, peer.line.receive())
        except LineError as error:
            self._lose(rank, peer, error)

    def _follow(self, rank: int, peer: _Peer, messages: list[Any]) -> None:
        """Do as a rank's messages say; what cannot be understood ends its connection."""
        for message in messages:
            try:
                match message:
                    case ["beat", status]:
                        status = Status.from_message(status)
                        if peer.end is None:  # a rank that has left its group goes on beating
                            peer.status, peer.heard = status, monotonic()
                    case ["help"]:
                        peer.asks = True
                        for other, one in list(self._peers.items()):
                            if one.end is not None:
                                self._send(peer, self._news_of(other, one))
                    case ["end", int(kind), str(error), bool(echo), status] if len(error) <= MAX_TEXT:
                        peer.status, peer.heard = Status.from_message(status), monotonic()
                        self._note_end(rank, peer, End(EndKind(kind), clean(error), echo))
                    case _:
                        raise ValueError("a message has another form")
            except ValueError as error:
                self._lose(rank, peer, LineError(str(error), closed=False))
                return

    def _lose(self, rank: int, peer: _Peer, error: LineError) -> None:
        """The connection of a rank is of no more use; so it has ended, unless it is the connection's own fault."""
        if peer.line is not None:
            self._selector.unregister(peer.line.socket)
            peer.line.close()
            peer.line = None
        if peer.end is not None:
            return
        if error.closed:
            self._note_end(rank, peer, End(EndKind.FAILED))
        elif error.__cause__ is None or not isinstance(error.__cause__, OSError):
            peer.status = None  # it spoke nonsense: nothing is known of it, and it is never called silent

    def _note_end(self, rank: int, peer: _Peer, end: End) -> None:
        if peer.end is not None:
            return
        peer.end, peer.ended = end, monotonic()
        news = self._news_of(rank, peer)
        self._deaths += end.failed
        for other in list(self._peers.values()):
            if other.asks or (end.failed and self._deaths <= MAX_DEATHS):
                self._send(other, news)
        with self._news:
            self._news.notify_all()

    def _news_of(self, rank: int, peer: _Peer) -> list[Any]:
        assert peer.end is not None
        status = None if peer.status is None else peer.status.message()
        times = [round(monotonic() - peer.ended, 2), round(peer.ended - peer.heard, 2)]
        return ["end", rank, int(peer.end.kind), peer.end.error, peer.end.echo, *times, status]

    def _send(self, peer: _Peer, message: Any) -> None:
        if peer.line is not None:
            with suppress(LineError):  # found out where it is read
                peer.line.send(message)

    def _beat(self, now: float) -> None:
        for line, until in list(self._strangers.items()):
            if now > until:
                self._turn_away(line)
        beat = ["beat", self.status.message()]
        finding = None
        if self.status.waits or any(one.status is not None and one.status.waits for one in self._peers.values()):
            finding = judge(self._seen(now), whole_job=self._whole_job)
        for peer in list(self._peers.values()):
            self._send(peer, beat)
            if finding is not None and finding.fatal:
                self._send(peer, ["fatal", list(finding.ranks[:MAX_DEATHS]), finding.text[:8000]])
        if finding is not None:
            self._act(finding, now)

    def _part(self, end: End) -> None:
        for peer in list(self._peers.values()):
            self._send(peer, ["end", 0, int(end.kind), end.error, end.echo, 0.0, 0.0, self.status.message()])

    def _forgive(self, seconds: float) -> None:
        super()._forgive(seconds)
        for peer in self._peers.values():
            peer.heard += seconds

    def _seen(self, now: float) -> dict[int, Seen]:
        seen = {rank: Seen() for rank in range(self._size)}
        seen[0] = Seen(self.status)
        if self._own_end is not None:
            end, when = self._own_end
            seen[0] = replace(seen[0], end=replace(end, ago=now - when))
        for rank, peer in list(self._peers.items()):
            if peer.end is None:
                seen[rank] = Seen(peer.status, now - peer.heard)
            else:
                end = replace(peer.end, ago=now - peer.ended)
                seen[rank] = Seen(peer.status, peer.ended - peer.heard, end)
        return seen
