"""The heartbeat of one rank: a thread that tells the first rank twice a second where this rank is.

The ranks form a star. The first rank of the group is the server: the others connect to it, and only it judges. So the
number of messages grows with the number of ranks, and not with its square. A rank that no longer hears the server
judges for itself. `server` and `client` have what differs between the two.
"""

from __future__ import annotations

import selectors
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from dpfuse.comm.waiting import Board, Doing, PeerFailure
from dpfuse.liveness.consequences import Consequences, print_line
from dpfuse.liveness.delivery_rates import DeliveryRates
from dpfuse.liveness.diagnosis import End, EndKind, RankState, end_with, find_cause
from dpfuse.liveness.own_status import OwnStatus
from dpfuse.liveness.requests import Requests

__all__ = ["Heartbeat"]

INTERVAL = 0.5  # seconds between two heartbeats of a rank
RANKS_PER_INTERVAL = 512  # in a larger group each rank sends fewer heartbeats, so that the server's work stays the same
GAP = 1.0  # seconds beyond the interval after which this process itself was stopped, and not its peers silent
EXPLAIN_WITHIN = 2.0  # seconds to wait for the news of a peer's end after a collective has failed


class Heartbeat:
    """What server and client share: the thread with its loop, and what other threads call.

    `whole_job` says whether the group has all ranks of the job, and `alive` tells whether it still exists.
    """

    def __init__(self, board: Board, size: int, *, whole_job: bool, alive: Callable[[], bool]) -> None:
        self._board = board
        self._rank = board.rank
        self._whole_job = whole_job
        self._alive = alive
        self._interval = INTERVAL * max(1.0, size / RANKS_PER_INTERVAL)
        self._extra = self._interval - INTERVAL  # seconds without a heartbeat that a large group makes normal
        self._selector = selectors.DefaultSelector()
        self._own = OwnStatus(board)
        self._rates = DeliveryRates()
        self._requests = Requests(self._selector)
        self._consequences = Consequences(board, self._own, self._requests)
        self._thread = threading.Thread(target=self._run, name="dpfuse-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._board.heartbeat = self
        self._thread.start()

    @property
    def beats(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def unannounced_end(self, code: int = 0) -> End:
        """Return how this rank ends, with an exit code, if it has announced nothing.

        With the code 0, an error that ended a forward counts, if the rank has done nothing since.
        """
        forward_error = self._board.error if self._board.place[1] is Doing.FORWARD else ""
        error = f"exit code {code}" if code else forward_error
        return End(EndKind.FAILED if error else EndKind.NORMAL, error)

    def announce(self, end: End, within: float = 0.5) -> None:
        """Tell the peers that this rank ends, and how; only the first end counts. Called by another thread."""
        if self.beats:
            self._requests.announce(end, within)

    def leave(self, error: BaseException) -> None:
        """Tell the peers that this rank takes part in no further collective of the group. Called by another thread."""
        self.announce(end_with(error, EndKind.LEFT))

    def explain(self) -> PeerFailure | None:
        """Return why a collective has just failed; may wait for the news. Called by the thread that trains."""
        self._requests.ask(self._knows_cause, EXPLAIN_WITHIN)
        failure = self._board.peer_failure  # read once: the heartbeat's thread may take it back
        if failure is not None:
            return failure
        finding = find_cause(self._states(monotonic()))
        return None if finding is None else PeerFailure(finding.text, finding.ranks)

    def stop(self) -> None:
        """End the thread. Called by another thread."""
        self._requests.stop()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # an error of the heartbeat must not end the job
            print_line(f"the heartbeat of rank {self._rank} has stopped: {type(error).__name__}: {error}")
        finally:
            self._requests.release_announcer()
            self.close()

    def close(self) -> None:
        """Close the connections: at the end of the thread, or in a fork, which has no such thread."""
        self._board.heartbeat = None
        if self._selector.get_map() is None:
            return  # in a fork of a process whose heartbeat had ended
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._requests.close()
        self._selector.close()

    def _loop(self) -> None:
        self._connect()
        last = monotonic() - self._interval  # the first heartbeat is sent at once
        while True:
            for key, _ in self._selector.select(max(0.0, last + self._interval - monotonic())):
                key.data(key.fileobj)
            now = monotonic()
            if self._requests.was_asked():
                self._ask_for_ends()
            end = self._requests.end_to_send()
            if end is not None:
                self._own.update(now)
                self._send_end(end)
                self._requests.release_announcer()
            if self._requests.stopping:
                return
            if not self._alive():
                self._own.update(now)
                self._send_end(self.unannounced_end())
                return
            if now >= last + self._interval:
                if now - last > self._interval + GAP:
                    # This process was stopped, or Python's lock was held, and it read no messages meanwhile.
                    self._own.discount(now - last - self._interval)
                    self._discount(now - last - self._interval)
                last = now
                self._own.update(now)
                self._beat(now)
                self._consequences.check_left(now)
                self._consequences.check_stuck(now)

    def _own_sums(self) -> list[Any]:
        """Return the seconds of this rank's phases since the last heartbeat, as JSON values, if they are measured."""
        clock = self._board.clock
        return [] if clock is None else [[step, [round(each, 6) for each in secs]] for step, secs in clock.taken()]

    def _knows_cause(self) -> bool:
        return self._board.peer_failure is not None or any(
            one.end is not None and not one.end.secondary for one in self._states(monotonic()).values()
        )

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
        raise NotImplementedError

    def _silence(self, now: float, heard: float) -> float:
        """Return for how many seconds a rank has been silent that was last heard at `heard`."""
        return max(0.0, now - heard - self._extra)

    def _states(self, now: float) -> dict[int, RankState]:
        """Return what this rank knows of the ranks."""
        raise NotImplementedError
