"""The status of this rank: where its thread that trains is, for how long, and whether it waits or is blocked.

Knows no other rank.
"""

from __future__ import annotations

from time import monotonic

from dpfuse.comm.waiting import Board
from dpfuse.liveness.diagnosis import Status
from dpfuse.liveness.thread_state import ThreadState, thread_state

__all__ = ["OwnStatus"]

INSPECT_AFTER = 1.0  # seconds at one place after which the thread that trains is inspected
QUERY_AFTER = 2.0  # seconds at one place after which the device is asked
IDLE_CPU = 0.02  # seconds of processor time between two updates up to which a thread counts as blocked


class OwnStatus:
    """Finds out what this rank does. Only the heartbeat's thread calls the methods.

    Attributes:
        status: as of the last update. Other threads read it, too.
        place: where this rank was at the last update. It differs after each move and each wait.
    """

    def __init__(self, board: Board) -> None:
        self.status = Status()
        self.place = (board.place, board.waits)
        self._board = board
        self._since = monotonic()  # when this rank came to its place
        self._thread_state = ThreadState()
        self._blocked_since: float | None = None

    def update(self, now: float) -> None:
        """Bring the status up to date."""
        board = self._board
        place = (board.place, board.waits)
        if place[0] is not self.place[0] or place[1] != self.place[1]:
            self.place, self._since, self._thread_state, self._blocked_since = place, now, ThreadState(), None
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
            board.failed_step, board.error.partition("\n")[0],
        )  # fmt: skip

    def discount(self, seconds: float) -> None:
        """Do not count seconds in which this process did not run."""
        now = monotonic()
        self._since = min(now, self._since + seconds)
        if self._blocked_since is not None:
            self._blocked_since = min(now, self._blocked_since + seconds)

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
