"""What the forwards of a window have asked for: whether the backward that follows synchronises. One table."""

from __future__ import annotations

from enum import Enum

__all__ = ["AFTER", "NOTHING", "TRAIN", "Asked"]


class Asked(Enum):
    """What forwards have asked for so far.

    If one of several is to synchronise, the backward does. One in eval mode decides only about backwards of its own,
    and where there is none in training mode: a rank may run it alone, and it gets no backward.

    Attributes:
        sync: whether a backward of these forwards synchronises; None where there was no forward.
        trains: whether one of them was in training mode.
        by_eval: whether one in eval mode has asked for a backward that synchronises.
    """

    NOTHING = None, False, False  # no forward
    EVAL_LOCAL = False, False, False
    EVAL_SYNC = True, False, True
    LOCAL = False, True, False
    SYNC = True, True, False
    LOCAL_BESIDE_EVAL_SYNC = False, True, True
    SYNC_BESIDE_EVAL_SYNC = True, True, True

    __hash__ = object.__hash__  # that of `Enum` is a function of Python, and each forward looks into the table

    def __init__(self, sync: bool | None, trains: bool, by_eval: bool) -> None:
        self.sync = sync
        self.trains = trains
        self.by_eval = by_eval


NOTHING, EVAL_LOCAL, EVAL_SYNC, LOCAL, SYNC, LOCAL_BESIDE_EVAL_SYNC, SYNC_BESIDE_EVAL_SYNC = Asked

TRAIN, EVAL = True, False
# By what was asked for, and by a forward: whether it trains, and whether it is to synchronise.
AFTER: dict[tuple[Asked, bool, bool], Asked] = {
    (NOTHING, EVAL, False): EVAL_LOCAL,
    (NOTHING, EVAL, True): EVAL_SYNC,
    (NOTHING, TRAIN, False): LOCAL,
    (NOTHING, TRAIN, True): SYNC,
    (EVAL_LOCAL, EVAL, False): EVAL_LOCAL,
    (EVAL_LOCAL, EVAL, True): EVAL_SYNC,
    (EVAL_LOCAL, TRAIN, False): LOCAL,
    (EVAL_LOCAL, TRAIN, True): SYNC,
    (EVAL_SYNC, EVAL, False): EVAL_SYNC,
    (EVAL_SYNC, EVAL, True): EVAL_SYNC,
    (EVAL_SYNC, TRAIN, False): LOCAL_BESIDE_EVAL_SYNC,
    (EVAL_SYNC, TRAIN, True): SYNC_BESIDE_EVAL_SYNC,
    (LOCAL, EVAL, False): LOCAL,
    (LOCAL, EVAL, True): LOCAL_BESIDE_EVAL_SYNC,
    (LOCAL, TRAIN, False): LOCAL,
    (LOCAL, TRAIN, True): SYNC,
    (SYNC, EVAL, False): SYNC,
    (SYNC, EVAL, True): SYNC_BESIDE_EVAL_SYNC,
    (SYNC, TRAIN, False): SYNC,
    (SYNC, TRAIN, True): SYNC,
    (LOCAL_BESIDE_EVAL_SYNC, EVAL, False): LOCAL_BESIDE_EVAL_SYNC,
    (LOCAL_BESIDE_EVAL_SYNC, EVAL, True): LOCAL_BESIDE_EVAL_SYNC,
    (LOCAL_BESIDE_EVAL_SYNC, TRAIN, False): LOCAL_BESIDE_EVAL_SYNC,
    (LOCAL_BESIDE_EVAL_SYNC, TRAIN, True): SYNC_BESIDE_EVAL_SYNC,
    (SYNC_BESIDE_EVAL_SYNC, EVAL, False): SYNC_BESIDE_EVAL_SYNC,
    (SYNC_BESIDE_EVAL_SYNC, EVAL, True): SYNC_BESIDE_EVAL_SYNC,
    (SYNC_BESIDE_EVAL_SYNC, TRAIN, False): SYNC_BESIDE_EVAL_SYNC,
    (SYNC_BESIDE_EVAL_SYNC, TRAIN, True): SYNC_BESIDE_EVAL_SYNC,
}
