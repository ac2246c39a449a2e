"""Where this rank is in its training: written by the thread that trains, read by its heartbeat. Knows no network."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntEnum
from math import inf
from threading import get_ident
from typing import Any, NamedTuple

__all__ = ["Board", "Doing", "Verdict", "Wrapper", "board_of", "put_board"]


class Doing(IntEnum):
    """What a rank does with a wrapped module."""

    BETWEEN = 0  # nothing: it computes a loss, steps, loads data, evaluates, saves
    FORWARD = 1  # runs a forward that is to be differentiated
    LOSS = 2  # has run one, and no backward since
    BACKWARD = 3  # runs a backward, or waits at its end


class Wrapper(NamedTuple):
    """One wrapper of a group."""

    number: int  # from 0, in the order in which they were made
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
    """

    def __init__(self, rank: int = 0, patient: frozenset[str] = frozenset()) -> None:
        self.rank = rank
        self.patient = patient
        # By the thread that trains.
        # Wrapper, what it does, the synchronised backward that is running or comes next (from 1), the bucket last sent
        # or waited for (-1: none). A new tuple for each move, so that the same object means that nothing has moved.
        self.place: tuple[Wrapper, Doing, int, int] = (Wrapper(0, inf), Doing.BETWEEN, 1, -1)
        self.waits = 0  # waits begun and ended for the peers: odd while it waits
        self.thread = get_ident()
        self.reached: Callable[[], bool] | None = None  # have the collectives, which nobody waits for, come to an end?
        self.error = ""  # what last ended a forward
        self.wrappers = 0
        # By the heartbeat.
        self.verdict: Verdict | None = None
        self.explain: Callable[[], Verdict | None] = lambda: None  # why a collective failed, after a moment

    def new_wrapper(self, stall_timeout: float, *, copy: bool = False) -> Wrapper:
        """A wrapper of this group. A copy, which some ranks may make alone, does not count."""
        self.wrappers += not copy
        return Wrapper(max(0, self.wrappers - 1), stall_timeout)


_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()


def board_of(group: Any) -> Board | None:
    """The board of a process group that has a heartbeat."""
    return _boards.get(group)


def put_board(group: Any, board: Board) -> None:
    """Make `board` that of the group."""
    _boards[group] = board
