"""What other threads ask of the heartbeat's thread: to announce the end of this rank, to ask for news, and to stop.

Knows no board and no other rank.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

from dpfuse.liveness.diagnosis import End

__all__ = ["Requests"]


class Requests:
    """Wakes the heartbeat's thread for a request, and lets the thread that made it wait for the answer.

    Other threads call `announce`, `ask` and `stop`, and the heartbeat's thread the rest. Any thread may call `own_end`.

    The selector of the heartbeat's thread gets a socket, which is closed with all others that are registered.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.stopping = False  # whether the heartbeat's thread must end
        self._waker, woken = socket.socketpair()
        for end in (self._waker, woken):
            end.setblocking(False)
        selector.register(woken, selectors.EVENT_READ, self._drain)
        self._own_end: tuple[End, float] | None = None  # with the time
        self._announced = threading.Event()
        self._asks = False  # whether the thread that trains wants to know which ranks have ended
        self._news = threading.Condition()  # notified when a rank has ended, and when a failure is on the board

    def announce(self, end: End, within: float) -> None:
        """Have the end of this rank sent to the peers, and wait for that; only the first end counts."""
        with self._news:  # two threads may announce an end at the same time
            if self._own_end is not None:
                return
            self._own_end = (end, monotonic())
        self._wake()
        self._announced.wait(within)

    def ask(self, known: Callable[[], bool], within: float) -> None:
        """Have the server asked which ranks have ended, and wait for news until `known()`."""
        self._asks = True
        self._wake()
        with self._news:
            self._news.wait_for(known, within)

    def stop(self) -> None:
        """Have the heartbeat's thread end; does not wait for that."""
        self.stopping = True
        self._wake()

    def own_end(self, now: float) -> End | None:
        """Return the end of this rank, with its time; None if there is none."""
        if self._own_end is None:
            return None
        end, when = self._own_end
        return replace(end, ago=now - when)

    def end_to_send(self) -> End | None:
        """Return the end of this rank if it has not been sent; else None."""
        return None if self._own_end is None or self._announced.is_set() else self._own_end[0]

    def release_announcer(self) -> None:
        """Let the thread go on that waits until the end is sent."""
        self._announced.set()

    def was_asked(self) -> bool:
        """Return whether there were calls of `ask` since the last call of this method."""
        if not self._asks:
            return False
        self._asks = False
        return True

    def notify(self) -> None:
        """Let threads that wait for news check what is known."""
        with self._news:
            self._news.notify_all()

    def close(self) -> None:
        """Close the socket that wakes the heartbeat's thread; later requests have no effect."""
        self._waker.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"!")

    def _drain(self, woken: Any) -> None:
        with suppress(OSError):
            woken.recv(4096)
