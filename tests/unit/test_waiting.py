"""How the wait for a collective ends."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from dpfuse.comm.waiting import Board, finish


class SlowFailure(dist.Work):
    """Runs for so many waits with a time limit, and has failed then."""

    def __init__(self, waits):
        super().__init__()
        self.left = waits

    def is_completed(self):
        return self.left <= 0

    def wait(self, timeout=timedelta(0)):
        self.left -= 1
        raise RuntimeError("planted" if self.left < 0 else "too short")


@pytest.mark.parametrize("waits", [0, 1, 3])
def test_a_collective_that_fails_after_a_while_is_an_error(waits):
    board = Board(interruptible=frozenset({"cpu"}))
    with pytest.raises(RuntimeError, match="planted"):
        finish(SlowFailure(waits), board)
    assert board.waits == 2, "one wait has begun and ended"
