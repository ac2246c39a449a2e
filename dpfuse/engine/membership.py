"""Whether this rank still takes part in the collectives of its group. Knows no gradient."""

from __future__ import annotations

import torch.distributed as dist

from dpfuse.comm.failed import mark
from dpfuse.comm.waiting import board_of, leave
from dpfuse.engine.report_layout import Question
from dpfuse.errors import DPFuseError

__all__ = ["Membership"]


class Membership:
    """The part that this rank takes in a group, until it is unknown in which collective the peers are.

    Args:
        group: the ranks.

    Attributes:
        group: as given.
        rank, size: of this process in it, and of all.
        source: the rank whose ready order and state all ranks take.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.source = 0
        self._left: BaseException | None = None  # why this rank has left the group

    def leave(self, error: BaseException) -> None:
        """Take part in no further collective of the group, since it is unknown in which one the peers are."""
        self._left = error
        mark(error)  # nothing is tried again after it
        leave(board_of(self.group), error)

    def check(self) -> None:
        """Raise DPFuseError if this rank has left the group."""
        if self._left is not None:
            raise DPFuseError(
                f"rank {self.rank}: a collective of this process group has failed in an earlier backward "
                f"({type(self._left).__name__}: {self._left}), so that the collectives of the ranks no longer fit "
                "together; expected a new group. Restart the job, or make another group and wrap the module again."
            )

    def answer(self, question: Question) -> None:
        """Do what was asked for on every rank, and leave the group if that raises."""
        try:
            question.answer()
        except BaseException as error:
            self.leave(error)
            raise
