"""A thread that tells the first rank twice a second where this one is, and hears of the others.

The first rank of the group is the hub: the others connect to it, and it alone judges, so that what travels grows with
the number of ranks and not with its square. A rank that no longer hears the hub judges for itself.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from time import monotonic
from typing import Any, NoReturn

from dpfuse.engine.waiting import Board, Doing, PeerFailure
from dpfuse.liveness.diagnosis import DIED_GRACE, End, EndKind, Finding, Seen, Status, blame, end_with
from dpfuse.liveness.sighting import Sighting, sight

__all__ = ["Heartbeat"]

BEAT = 0.5  # seconds between two heartbeats of a rank
RANKS_PER_BEAT = 512  # of more than so many, each sends fewer, so that the hub has as much to do
LOOK_AFTER = 1.0  # seconds at one place after which the thread that trains is looked at
QUERY_AFTER = 2.0  # seconds at one place after which its device is asked; one that moves is not disturbed
IDLE_CPU = 0.02  # seconds of processor time between two heartbeats up to which a thread counts as blocked
GAP = 1.0  # seconds between two turns, beyond BEAT, that are no peer's silence but our own
EXPLAIN_WITHIN = 2.0  # seconds in which the news of a peer's end comes, when a collective has failed
REMIND_AFTER = 60.0  # seconds between two warnings
DESTROY = "destroy_process_group"
GRACE = 2.0  # seconds that the thread that trains gets to end with an error of its own


class Heartbeat:
    """What hub and spoke share: the thread, this rank's own status, and what is done about a finding.

    Args:
        board: of the group.
        size: number of its ranks.
        whole_job: whether the group is all of the job.
        alive: whether the group still exists.
    """

    def __init__(self, board: Board, size: int, *, whole_job: bool, alive: Callable[[], bool]) -> None:
        self._board = board
        self._rank = board.rank
        self._whole_job = whole_job
        self._alive = alive
        self._interval = BEAT * max(1.0, size / RANKS_PER_BEAT)
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake_up)
        self._moved = (board.place, board.waits)
        self._since = monotonic()
        self._look = Sighting()
        self._blocked_since: float | None = None
        self._own_end: tuple[End, float] | None = None  # with the time
        self._said = threading.Event()
        self._news = threading.Condition()
        self._asked = False
        self._warned = 0.0  # when
        self._stopping = False
        self.status = Status()
        self._fatal_at = 0.0  # when the last verdict came
        self._fatal_for = self._moved  # and where this rank was
        self._thread = threading.Thread(target=self._run, name="dpfuse-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._board.heartbeat = self
        self._thread.start()

    @property
    def beats(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def last_error(self) -> str:
        """What has ended a forward, if nothing was done since."""
        return self._board.error if self._board.place[1] is Doing.FORWARD else ""

    def announce(self, end: End, within: float = 0.5) -> None:
        """Tell the peers that this rank ends, and how; the first end counts. Called by another thread."""
        if self._own_end is None and self._thread.is_alive():
            self._own_end = (end, monotonic())
            self._wake()
            self._said.wait(within)

    def leave(self, error: BaseException) -> None:
        """Tell the peers that this rank takes part in no further collective of the group. Called by another thread."""
        self.announce(end_with(error, EndKind.LEFT))

    def stop(self, within: float = 1.0) -> None:
        """End the thread. Called by another one."""
        self._stopping = True
        self._wake()
        self._thread.join(within)

    def abandon(self) -> None:
        """In a fork, which has no such thread: let go of the connections, so that they end with the parent."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._waker.close()
        self._selector.close()
        self._board.heartbeat = None

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # nothing that happens here may cost the job anything
            self._print(f"the heartbeat of rank {self._rank} has stopped: {type(error).__name__}: {error}")
        finally:
            self._board.heartbeat = None
            self._said.set()
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._waker.close()
            self._selector.close()

    def _loop(self) -> None:
        last = monotonic()
        self._begin()
        while True:
            for key, _ in self._selector.select(max(0.0, last + self._interval - monotonic())):
                key.data(key.fileobj)
            now = monotonic()
            if self._asked:
                self._asked = False
                self._ask()
            if self._own_end is not None and not self._said.is_set():
                self._see_myself(now)
                self._part(self._own_end[0])
                self._said.set()
            if self._stopping:
                return
            if not self._alive():
                self._part(End(EndKind.NORMAL))
                return
            if now >= last + self._interval:
                if now - last > self._interval + GAP:
                    # This process was stopped, or Python's lock held: whoever spoke meanwhile was not heard in time.
                    self._forgive(now - last - self._interval)
                last = now
                self._see_myself(now)
                self._beat(now)
                self._give_up_if_left(now)
                self._end_if_stuck(now)

    def _see_myself(self, now: float) -> None:
        """Bring this rank's own status up to date."""
        board = self._board
        moved = (board.place, board.waits)
        if moved[0] is not self._moved[0] or moved[1] != self._moved[1]:
            self._moved, self._since, self._look, self._blocked_since = moved, now, Sighting(), None
        age = now - self._since
        if age >= LOOK_AFTER:
            before, self._look = self._look, sight(board.thread)
            still = before.call and before.call == self._look.call and before.cpu is not None
            if not still or self._look.cpu is None or self._look.cpu - (before.cpu or 0.0) > IDLE_CPU:
                self._blocked_since = None
            elif self._blocked_since is None:
                self._blocked_since = now
        wrapper, doing, completed, bucket = moved[0]
        waits = moved[1] % 2 == 1 or self._overdue(age)
        blocked = 0.0 if self._blocked_since is None or waits else now - self._blocked_since
        self.status = Status(
            doing, completed + 1, bucket, wrapper.number, age, waits, wrapper.stall_timeout,
            self._look.at, self._look.call if blocked else "", blocked,
        )  # fmt: skip

    def _overdue(self, age: float) -> bool:
        """Whether collectives that nobody waits for on the CPU have not come to an end."""
        device_done = self._board.device_done
        if device_done is None or age < QUERY_AFTER:
            return False
        try:
            done = device_done()
        except RuntimeError:
            done = True  # its own error says more
        if done and self._board.device_done is device_done:
            self._board.device_done = None
        return not done

    def _act(self, finding: Finding, now: float) -> None:
        """Warn; or tell the thread that trains not to wait any longer."""
        if finding.fatal:
            if self._board.peer_failure is None and self.status.waits:
                self._board.peer_failure = PeerFailure(finding.text, finding.ranks)
                self._fatal_at, self._fatal_for = now, self._moved
                with self._news:
                    self._news.notify_all()
        elif now >= self._warned + REMIND_AFTER or not self._warned:
            self._warned = now
            self._print(f"after {finding.waited:.0f} s {finding.text}")

    def _give_up_if_left(self, now: float) -> None:
        """After this rank has left its group, end a wait for a collective that the peers do not join."""
        if self._own_end is None or self._own_end[0].kind is not EndKind.LEFT:
            return
        if self.status.waits and self.status.age >= DIED_GRACE and isfinite(self.status.limit):
            text = f"it {self._own_end[0]}; expected no further collective in it. Make a new process group"
            self._act(Finding(True, (self._rank,), self.status.age, text), now)

    def _end_if_stuck(self, now: float) -> None:
        """Leave, if the thread that trains cannot; and take back a verdict that has come too late."""
        failure = self._board.peer_failure
        if failure is not None and self._moved != self._fatal_for:
            self._board.peer_failure = None  # it has raised an error, or what it waited for has come after all
        elif failure is not None and self.status.waits and now >= self._fatal_at + GRACE:
            self._end(failure.text)
        elif self._board.gave_up and self._look.call == DESTROY and self.status.blocked >= GRACE:
            self._end("its process group does not let itself be destroyed")

    def _end(self, why: str) -> NoReturn:
        self._print(f"rank {self._rank} ends, for it cannot go on: {why}")
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)

    def explain(self) -> PeerFailure | None:
        """Why a collective has just failed; waits a moment for the news. Called by the thread that trains."""
        self._asked = True
        self._wake()
        with self._news:
            self._news.wait_for(self._knows_cause, EXPLAIN_WITHIN)
        if self._board.peer_failure is not None:
            return self._board.peer_failure
        finding = blame(self._seen(monotonic()))
        return None if finding is None else PeerFailure(finding.text, finding.ranks)

    def _knows_cause(self) -> bool:
        return self._board.peer_failure is not None or any(
            one.end is not None and not one.end.echo for one in self._seen(monotonic()).values()
        )

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"!")

    def _wake_up(self, woken: Any) -> None:
        with suppress(OSError):
            woken.recv(4096)

    def _print(self, text: str) -> None:
        with suppress(Exception):
            sys.stderr.write(f"dpfuse: {text}\n")
            sys.stderr.flush()

    def _begin(self) -> None:
        raise NotImplementedError

    def _part(self, end: End) -> None:
        raise NotImplementedError

    def _beat(self, now: float) -> None:
        raise NotImplementedError

    def _ask(self) -> None:
        """Ask who has ended, where that is not known here."""

    def _forgive(self, seconds: float) -> None:
        """Do not count seconds in which nobody could be heard."""
        self._since += seconds
        if self._blocked_since is not None:
            self._blocked_since += seconds

    def _seen(self, now: float) -> dict[int, Seen]:
        raise NotImplementedError
