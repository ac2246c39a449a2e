"""Where a bucket is on its way. Imports nothing of dpfuse."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["FLIGHT", "FREE", "LANDED", "BucketState"]


class BucketState(Enum):
    """Where a bucket is; every other move than the three down this list raises."""

    FREE = auto()  # nobody waits for the buffer: launch() may fill it
    FLIGHT = auto()  # packed; the all-reduce reads and writes the buffer until wait() returns
    LANDED = auto()  # reduced; deliver() or discard() hands it back


FREE, FLIGHT, LANDED = BucketState  # for the hot path: before Python 3.12 a member takes long to look up
