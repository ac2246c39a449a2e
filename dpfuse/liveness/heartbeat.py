"""The heartbeat of one rank: a thread that tells the first rank twice a second where this rank is.

The ranks form a star. The first rank of the group is the server: the others connect to it, and only it judges. So the
number of messages grows with the number of ranks, and not with its square. A rank that no longer hears the server
judges for itself. `server` and `client` have what differs between the two.
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
from dpfuse.liveness.diagnosis import FAILED_GRACE, End, EndKind, Finding, RankState, Status, end_with, find_cause
from dpfuse.liveness.thread_state import ThreadState, thread_state

__all__ = ["Heartbeat"]

INTERVAL = 0.5  # seconds between two heartbeats of a rank
RANKS_PER_INTERVAL = 512  # in a larger group each rank sends fewer heartbeats, so that the server's work stays the same
INSPECT_AFTER = 1.0  # seconds at one place after which the heartbeat inspects the thread that trains
QUERY_AFTER = 2.0  # seconds at one place after which the heartbeat asks the device
IDLE_CPU = 0.02  # seconds of processor time between two heartbeats up to which a thread counts as blocked
GAP = 1.0  # seconds beyond the interval after which this process itself was stopped, and not its peers silent
EXPLAIN_WITHIN = 2.0  # seconds to wait for the news of a peer's end after a collective has failed
REMIND_AFTER = 60.0  # seconds between two warnings
DESTROY = "destroy_process_group"
STUCK_GRACE = 2.0  # seconds that the thread that trains gets to end with an error of its own


class Heartbeat:
    """What server and client share: the thread, the status of this rank, and what follows from a finding.

    Args:
        board: of the group.
        size: number of its ranks.
        whole_job: whether the group has all ranks of the job.
        alive: tells whether the group still exists.
    """

    def __init__(self, board: Board, size: int, *, whole_job: bool, alive: Callable[[], bool]) -> None:
        self._board = board
        self._rank = board.rank
        self._whole_job = whole_job
        self._alive = alive
        self._interval = INTERVAL * max(1.0, size / RANKS_PER_INTERVAL)
        self._extra = self._interval - INTERVAL  # seconds without a heartbeat that a large group makes normal
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain_waker)
        self._place = (board.place, board.waits)
        self._since = monotonic()  # when this rank came to its place
        self._thread_state = ThreadState()
        self._blocked_since: float | None = None
        self._own_end: tuple[End, float] | None = None  # with the time
        self._announced = threading.Event()
        self._news = threading.Condition()  # notified when a rank has ended, and when a failure is on the board
        self._asks = False  # whether the thread that trains wants to know which ranks have ended
        self._warned = 0.0  # when
        self._stopping = False
        self.status = Status()
        self._failed_at = 0.0  # when the last failure was put on the board
        self._failed_in = self._place  # and where this rank was then
        self._thread = threading.Thread(target=self._run, name="dpfuse-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._board.heartbeat = self
        self._thread.start()

    @property
    def beats(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def last_error(self) -> str:
        """The error that ended a forward, if the rank has done nothing since; else empty."""
        return self._board.error if self._board.place[1] is Doing.FORWARD else ""

    def announce(self, end: End, within: float = 0.5) -> None:
        """Tell the peers that this rank ends, and how; only the first end counts. Called by another thread."""
        if self._own_end is None and self._thread.is_alive():
            self._own_end = (end, monotonic())
            self._wake()
            self._announced.wait(within)

    def leave(self, error: BaseException) -> None:
        """Tell the peers that this rank takes part in no further collective of the group. Called by another thread."""
        self.announce(end_with(error, EndKind.LEFT))

    def explain(self) -> PeerFailure | None:
        """Return why a collective has just failed; may wait for the news. Called by the thread that trains."""
        self._asks = True
        self._wake()
        with self._news:
            self._news.wait_for(self._knows_cause, EXPLAIN_WITHIN)
        if self._board.peer_failure is not None:
            return self._board.peer_failure
        finding = find_cause(self._states(monotonic()))
        return None if finding is None else PeerFailure(finding.text, finding.ranks)

    def stop(self, within: float = 1.0) -> None:
        """End the thread. Called by another thread."""
        self._stopping = True
        self._wake()
        self._thread.join(within)

    def abandon(self) -> None:
        """In a fork, which has no such thread: close the connections, so that they end with the parent."""
        self._close()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # an error of the heartbeat must not end the job
            self._print(f"the heartbeat of rank {self._rank} has stopped: {type(error).__name__}: {error}")
        finally:
            self._announced.set()
            self._close()

    def _close(self) -> None:
        self._board.heartbeat = None
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._waker.close()
        self._selector.close()

    def _loop(self) -> None:
        last = monotonic()
        self._connect()
        while True:
            for key, _ in self._selector.select(max(0.0, last + self._interval - monotonic())):
                key.data(key.fileobj)
            now = monotonic()
            if self._asks:
                self._asks = False
                self._ask_for_ends()
            if self._own_end is not None and not self._announced.is_set():
                self._update_status(now)
                self._send_end(self._own_end[0])
                self._announced.set()
            if self._stopping:
                return
            if not self._alive():
                self._send_end(End(EndKind.NORMAL))
                return
            if now >= last + self._interval:
                if now - last > self._interval + GAP:
                    # This process was stopped, or Python's lock was held, and it read no messages meanwhile.
                    self._discount(now - last - self._interval)
                last = now
                self._update_status(now)
                self._beat(now)
                self._check_left(now)
                self._check_stuck(now)

    def _update_status(self, now: float) -> None:
        """Bring the status of this rank up to date."""
        board = self._board
        place = (board.place, board.waits)
        if place[0] is not self._place[0] or place[1] != self._place[1]:
            self._place, self._since, self._thread_state, self._blocked_since = place, now, ThreadState(), None
        age = now - self._since
        if age >= INSPECT_AFTER:
            before, self._thread_state = self._thread_state, thread_state(board.thread)
            still = before.call and before.call == self._thread_state.call and before.cpu is not None
            cpu = self._thread_state.cpu
            if not still or cpu is None or cpu - (before.cpu or 0.0) > IDLE_CPU:
                self._blocked_since = None
            elif self._blocked_since is None:
                self._blocked_since = now
        wrapper, doing, completed, bucket = place[0]
        waits = place[1] % 2 == 1 or self._device_waits(age)
        blocked = 0.0 if self._blocked_since is None or waits else now - self._blocked_since
        self.status = Status(
            doing, completed + 1, bucket, wrapper.number, age, waits, wrapper.stall_timeout,
            self._thread_state.at, self._thread_state.call if blocked else "", blocked,
        )  # fmt: skip

    def _device_waits(self, age: float) -> bool:
        """Whether the device has not run the last collective, for which the CPU does not wait."""
        device_done = self._board.device_done
        if device_done is None or age < QUERY_AFTER:
            return False
        try:
            done = device_done()
        except RuntimeError:
            done = True  # the training thread meets the device's error and raises it
        if done and self._board.device_done is device_done:
            self._board.device_done = None
        return not done

    def _act(self, finding: Finding, now: float) -> None:
        """Print a warning; or put a failure on the board, which ends the wait of the thread that trains."""
        if finding.fatal:
            if self._board.peer_failure is None and self.status.waits:
                self._board.peer_failure = PeerFailure(finding.text, finding.ranks)
                self._failed_at, self._failed_in = now, self._place
                self._notify()
        elif now >= self._warned + REMIND_AFTER or not self._warned:
            self._warned = now
            self._print(f"after {finding.waited:.0f} s {finding.text}")

    def _check_left(self, now: float) -> None:
        """After this rank has left its group, end a wait for a collective that the peers do not join."""
        if self._own_end is None or self._own_end[0].kind is not EndKind.LEFT:
            return
        if self.status.waits and self.status.age >= FAILED_GRACE and isfinite(self.status.limit):
            text = f"it {self._own_end[0]}; expected no further collective in it. Make a new process group"
            self._act(Finding(True, (self._rank,), self.status.age, text), now)

    def _check_stuck(self, now: float) -> None:
        """End the process if the thread that trains cannot raise; or take back a failure that came too late."""
        failure = self._board.peer_failure
        if failure is not None and self._place != self._failed_in:
            self._board.peer_failure = None  # the thread has raised an error, or its collective has ended after all
        elif failure is not None and self.status.waits and now >= self._failed_at + STUCK_GRACE:
            self._end_process(failure.text)
        elif self._board.gave_up and self._thread_state.call == DESTROY and self.status.blocked >= STUCK_GRACE:
            self._end_process(f"{DESTROY}() does not return")

    def _end_process(self, why: str) -> NoReturn:
        self._print(f"rank {self._rank} ends because it cannot go on: {why}")
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)

    def _knows_cause(self) -> bool:
        return self._board.peer_failure is not None or any(
            one.end is not None and not one.end.secondary for one in self._states(monotonic()).values()
        )

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"!")

    def _drain_waker(self, woken: Any) -> None:
        with suppress(OSError):
            woken.recv(4096)

    def _print(self, text: str) -> None:
        with suppress(Exception):
            sys.stderr.write(f"dpfuse: {text}\n")
            sys.stderr.flush()

    def _connect(self) -> None:
        """Connect to the server, or accept connections."""
        raise NotImplementedError

    def _send_end(self, end: End) -> None:
        """Send the end of this rank."""
        raise NotImplementedError

    def _beat(self, now: float) -> None:
        """Send a heartbeat, and judge."""
        raise NotImplementedError

    def _ask_for_ends(self) -> None:
        """Ask the server which ranks have ended; the server knows."""

    def _discount(self, seconds: float) -> None:
        """Do not count seconds in which this process could not receive."""
        self._since += seconds
        if self._blocked_since is not None:
            self._blocked_since += seconds

    def _silence(self, now: float, heard: float) -> float:
        """Return for how many seconds a rank has been silent that was last heard at `heard`."""
        return max(0.0, now - heard - self._extra)

    def _states(self, now: float) -> dict[int, RankState]:
        """Return what this rank knows of the ranks."""
        raise NotImplementedError
