"""What a backward means for who reduces its gradients. Imports nothing of dpfuse."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["ABANDONED", "CHANGED", "IDLE", "LOCAL", "RECORDERS", "RECORDING", "REDUCING", "RESTING", "Phase"]


class Phase(Enum):
    """What the backward that is open, if any, means for the reducer."""

    IDLE = auto()  # none is open; the next ready mark opens one
    LOCAL = auto()  # it does not synchronise; marks mean nothing
    RECORDING = auto()  # the first that synchronises: marks are recorded, all is sent at its end
    CHANGED = auto()  # like RECORDING, but first the buckets of the model before are sent, empty
    REDUCING = auto()  # a bucket is sent once it and all before it are complete, the last one at the end
    ABANDONED = auto()  # it synchronised, and an exception ended it; to be drained before anything else


# For the hot path: before Python 3.12 a member takes long to look up.
IDLE, LOCAL, RECORDING, CHANGED, REDUCING, ABANDONED = Phase
RECORDERS = (RECORDING, CHANGED)  # all is sent at their end
RESTING = (IDLE, ABANDONED)  # no backward is running
