"""The heartbeat of every rank but a group's first: talks to the hub, and judges for itself where that is silent."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

from dpfuse.liveness.diagnosis import MAX_TEXT, SILENT, End, EndKind, Finding, Seen, Status, clean, judge
from dpfuse.liveness.heartbeat import Heartbeat
from dpfuse.liveness.line import Line, LineError
from dpfuse.liveness.meeting import Meeting

__all__ = ["Spoke"]

CONNECT_WITHIN = 30.0  # seconds, over all attempts
ATTEMPT = 2.0  # seconds for one
MAX_REPORT = 64 << 10  # bytes


class Spoke(Heartbeat):
    """Connects to where the hub listens.

    Args:
        meeting: where that is.
        **others: as for `Heartbeat`.
    """

    def __init__(self, meeting: Meeting, **others: Any) -> None:
        super().__init__(**others)
        self._meeting = meeting
        self._line: Line | None = None
        self._heard = monotonic()
        self._hub: Status | None = None
        self._ends: dict[int, tuple[Seen, float]] = {}  # with the time

    def _begin(self) -> None:
        self._line = Line(self._connected(), MAX_REPORT)
        self._heard = monotonic()
        self._selector.register(self._line.socket, selectors.EVENT_READ, self._hear)
        self._say(["hello", self._meeting.token, self._rank])

    def _connected(self) -> socket.socket:
        deadline = monotonic() + CONNECT_WITHIN
        while True:
            for place in self._meeting.places:
                if self._stopping:
                    raise OSError("the rank ended before it was connected")
                with suppress(OSError):
                    return socket.create_connection(place, ATTEMPT)
            if monotonic() > deadline:
                places = ", ".join(f"{host} port {port}" for host, port in self._meeting.places)
                raise OSError(f"rank 0 cannot be reached at {places}; a rank that ends or stalls will not be named")
            sleep(0.1)

    def _say(self, message: Any) -> None:
        if self._line is not None:
            with suppress(LineError):  # found out where it is read
                self._line.send(message)

    def _hear(self, _socket: Any) -> None:
        assert self._line is not None
        try:
            for message in self._line.receive():
                self._follow(message)
        except (LineError, ValueError) as error:
            self._selector.unregister(self._line.socket)
            self._line.close()
            self._line = None
            if isinstance(error, LineError) and error.closed:
                now = monotonic()
                self._note_end(0, End(EndKind.FAILED), Seen(self._hub, now - self._heard), now)
            elif not isinstance(error.__cause__, OSError):
                raise LineError(f"rank 0 says what cannot be understood: {error}", closed=False) from error

    def _follow(self, message: Any) -> None:
        now = monotonic()
        match message:
            case ["beat", status]:
                self._hub, self._heard = Status.from_message(status), now
            case ["fatal", list(ranks), str(text)]:
                self._heard = now
                self._act(Finding(True, tuple(int(rank) for rank in ranks), 0.0, clean(text, lines=True)), now)
            case ["end", int(rank), int(kind), str(error), bool(echo), float(ago), float(silence), status]:
                last = None if status is None else Status.from_message(status)
                self._note_end(rank, End(EndKind(kind), clean(error[:MAX_TEXT]), echo), Seen(last, silence), now - ago)
            case _:
                raise ValueError("a message has another form")

    def _note_end(self, rank: int, end: End, last: Seen, when: float) -> None:
        if rank not in self._ends:
            self._ends[rank] = (replace(last, end=end), when)
            with self._news:
                self._news.notify_all()

    def _beat(self, now: float) -> None:
        self._say(["beat", self.status.message()])
        hub = self._seen(now)[0]
        # As long as the hub is there it knows more.
        if self.status.waits and (hub.end is not None or hub.silence >= SILENT):
            finding = judge(self._seen(now), whole_job=False)
            if finding is not None:
                self._act(finding, now)

    def _part(self, end: End) -> None:
        self._say(["end", int(end.kind), end.error, end.echo, self.status.message()])

    def _ask(self) -> None:
        self._say(["help"])

    def _forgive(self, seconds: float) -> None:
        super()._forgive(seconds)
        self._heard += seconds

    def _seen(self, now: float) -> dict[int, Seen]:
        seen = {0: Seen(self._hub, now - self._heard), self._rank: Seen(self.status)}
        for rank, (one, when) in list(self._ends.items()):
            assert one.end is not None
            seen[rank] = replace(one, end=replace(one.end, ago=now - when))
        return seen
