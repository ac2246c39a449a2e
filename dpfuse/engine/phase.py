"""What the backward that is open, if any, means for the reducer."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["ABANDONED", "CHANGED", "IDLE", "LOCAL", "RECORDING", "REDUCING", "RESTING", "Phase"]


class Phase(Enum):
    """What the backward that is open, if any, means for the reducer."""

    IDLE = auto()  # none is open
    LOCAL = auto()  # it is not synchronised
    RECORDING = auto()  # the first that is synchronised: all buckets are sent at its end
    CHANGED = auto()  # like RECORDING, but first the buckets of the old model are sent, empty
    REDUCING = auto()  # a bucket is sent once it and all before it are complete, the last one at the end
    ABANDONED = auto()  # an exception ended a synchronised backward; `drain` comes before anything else


# For the hot path: before Python 3.12, looking up a member is slow.
IDLE, LOCAL, RECORDING, CHANGED, REDUCING, ABANDONED = Phase
RESTING = (IDLE, ABANDONED)  # no backward is running
