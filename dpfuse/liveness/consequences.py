"""What follows from a finding: a warning, an error in the thread that trains, or the end of this process.

Knows no network, and does not judge other ranks.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from math import isfinite
from typing import NoReturn

from dpfuse.comm.waiting import Board, PeerFailure
from dpfuse.liveness.diagnosis import FAILED_GRACE, Diagnosis, EndKind
from dpfuse.liveness.own_status import OwnStatus
from dpfuse.liveness.requests import Requests

__all__ = ["Consequences", "end_now", "print_line"]

log = logging.getLogger("dpfuse.stall")

REMIND_AFTER = 60.0  # seconds between two warnings
DESTROY = "destroy_process_group"
STUCK_GRACE = 2.0  # seconds that the thread that trains gets to end with an error of its own


class Consequences:
    """Acts in this process on findings. Only the heartbeat's thread calls the methods.

    `requests` know whether this rank has left its group, and pass on that there is a failure.
    """

    def __init__(self, board: Board, own: OwnStatus, requests: Requests) -> None:
        self._board = board
        self._own = own
        self._requests = requests
        self._warned = 0.0  # when
        self._failed_at = 0.0  # when the last failure was put on the board
        self._failed_in = own.place  # and where this rank was then

    def act(self, finding: Diagnosis, now: float) -> None:
        """Print a warning; or put a failure on the board, which ends the wait of the thread that trains."""
        if finding.fatal:
            if self._board.peer_failure is None and self._own.status.waits:
                self._board.peer_failure = PeerFailure(finding.text, finding.ranks, self._own.place[1])
                self._failed_at, self._failed_in = now, self._own.place
                self._requests.notify()
                self._log(finding.text)
        elif now >= self._warned + REMIND_AFTER or not self._warned:
            self._warned = now
            print_line(f"after {finding.waited:.0f} s {finding.text}")
            self._log(f"after {finding.waited:.0f} s {finding.text}")

    def _log(self, text: str) -> None:
        # As information: a higher level would be printed once more where no program has set up logging.
        log.info("rank %d: %s", self._board.rank, text, extra={"rank": self._board.rank})

    def check_left(self, now: float) -> None:
        """After this rank has left its group, end a wait for a collective that the peers do not join."""
        end = self._requests.own_end(now)
        if end is None or end.kind is not EndKind.LEFT:
            return
        status = self._own.status
        if status.waits and status.age >= FAILED_GRACE and isfinite(status.limit):
            text = f"it {end}; expected no further collective in it. Make a new process group"
            self.act(Diagnosis(True, (self._board.rank,), status.age, text), now)

    def check_stuck(self, now: float) -> None:
        """End the process if the thread that trains cannot raise; or take back a failure that came too late."""
        failure, status = self._board.peer_failure, self._own.status
        if failure is not None and self._own.place != self._failed_in:
            self._board.peer_failure = None  # the thread has raised an error, or its collective has ended after all
        elif failure is not None and status.waits and now >= self._failed_at + STUCK_GRACE:
            self._end_process(failure.text)
        elif self._board.gave_up and status.call == DESTROY and status.blocked >= STUCK_GRACE:
            self._end_process(f"{DESTROY}() does not return")

    def _end_process(self, why: str) -> NoReturn:
        print_line(f"rank {self._board.rank} ends because it cannot go on: {why}")
        end_now(1)


def end_now(code: int) -> NoReturn:
    """End this process with an exit code, and wait for no thread."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def print_line(text: str) -> None:
    """Print a text for the user, if that is still possible."""
    with suppress(Exception):
        sys.stderr.write(f"dpfuse: {text}\n")
        sys.stderr.flush()
