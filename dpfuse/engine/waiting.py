"""Where this rank is in its training: written by the thread that trains, read by its heartbeat. Knows no network."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntEnum
from math import inf
from threading import get_ident
from typing import Any, NamedTuple

__all__ = [
    "BACKWARD",
    "BETWEEN",
    "FORWARD",
    "LOSS",
    "Board",
    "Doing",
    "Track",
    "Verdict",
    "Wrapper",
    "board_of",
    "put_board",
]


class Doing(IntEnum):
    """What a rank does with a wrapped module."""

    BETWEEN = 0  # nothing: it computes a loss, steps, loads data, evaluates, saves
    FORWARD = 1  # runs a forward that is to be differentiated
    LOSS = 2  # has run one, and no backward since
    BACKWARD = 3  # runs a backward, or waits at its end


BETWEEN, FORWARD, LOSS, BACKWARD = Doing  # for the hot path: before Python 3.12 a member takes long to look up


class Wrapper(NamedTuple):
    """One wrapper of a group."""

    number: int  # in the order in which they were made
    stall_timeout: float  # seconds


class Verdict(NamedTuple):
    """That there is no use in waiting any longer."""

    text: str
    ranks: tuple[int, ...]  # of the group; those that are to blame


class Board:
    """What the thread that trains and the heartbeat of its group tell each other, without a lock.

    Attributes are written as they are: some ten nanoseconds each, in the middle of every step.

    Args:
        rank: of this process in the group.
        patient: the types of devices on which waiting for a work of this group can be interrupted.
        stall_timeout: of the first wrapper, in seconds, as long as it is being made.
    """

    def __init__(self, rank: int = 0, patient: frozenset[str] = frozenset(), stall_timeout: float = inf) -> None:
        self.rank = rank
        self.patient = patient
        # By the thread that trains.
        # Wrapper, what it does, synchronised backwards completed, the bucket last sent or waited for (-1: none). A new
        # tuple for each move, so that the same object means that nothing has moved.
        self.place: tuple[Wrapper, Doing, int, int] = (Wrapper(0, stall_timeout), Doing.BETWEEN, 0, -1)
        self.waits = 0  # waits begun and ended for the peers: odd while it waits
        self.thread = get_ident()
        self.reached: Callable[[], bool] | None = None  # have the collectives, which nobody waits for, come to an end?
        self.error = ""  # what last ended a forward
        self.gave_up = False  # whether it was told that another rank is to blame
        # By the heartbeat.
        self.verdict: Verdict | None = None
        self.explain: Callable[[], Verdict | None] = lambda: None  # why a collective failed, after a moment


class Track:
    """What one wrapper writes on the board of its group.

    Args:
        board: None where there is no heartbeat; then it is written for nobody.
        number: of the wrapper.
        stall_timeout: of the wrapper, in seconds.
    """

    def __init__(self, board: Board | None = None, number: int = 0, stall_timeout: float = inf) -> None:
        self._board = board or Board()
        self._wrapper = Wrapper(number, stall_timeout)

    def tell(self, doing: Doing, completed: int, bucket: int = -1) -> None:
        """This is done now, after so many synchronised backwards; on the hot path."""
        self._board.place = (self._wrapper, doing, completed, bucket)

    def begin(self, completed: int) -> None:
        """A forward begins, in the thread that trains."""
        self._board.thread = get_ident()
        self._board.place = (self._wrapper, FORWARD, completed, -1)

    def failed(self, error: Exception) -> None:
        """A forward died of an exception, of which the process may end without a word."""
        self._board.error = f"{type(error).__name__}: {error}"


_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()


def board_of(group: Any) -> Board | None:
    """The board of a process group that has a heartbeat."""
    return _boards.get(group)


def put_board(group: Any, board: Board) -> None:
    """Make `board` that of the group."""
    _boards[group] = board
