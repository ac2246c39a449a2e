"""Gives a process group its heartbeat: the ranks agree where to meet, and each starts its thread. Judges nothing."""

from __future__ import annotations

import sys
import weakref

import torch.distributed as dist

from dpfuse.engine import votes
from dpfuse.engine.waiting import Board, board_of, interruptible_devices, put_board
from dpfuse.liveness import ending
from dpfuse.liveness.heartbeat import Heartbeat
from dpfuse.liveness.hub import Hub
from dpfuse.liveness.meeting import Meeting, host_name, open_meeting
from dpfuse.liveness.spoke import Spoke

__all__ = ["watch"]


def watch(group: dist.ProcessGroup, stall_timeout: float) -> Board:
    """The board of a group, which from now on has a heartbeat; to be called on all its ranks.

    A group of one rank gets none. Nor does one whose first rank cannot be reached, which is said once.

    Args:
        group: process group.
        stall_timeout: of the wrapper that is being made, in seconds.
    """
    board = board_of(group)
    if board is not None:
        return board
    rank, size = group.rank(), group.size()
    board = Board(rank, interruptible_devices(group), stall_timeout)
    put_board(group, board)
    if size == 1:
        return board
    hosts = votes.gather_texts(host_name(), group)
    meeting = None
    if rank == 0:
        try:
            meeting = open_meeting(one_host=len(set(hosts)) == 1)
        except OSError as error:
            print(f"dpfuse: no heartbeat, so no rank that ends or stalls will be named: {error}", file=sys.stderr)
    text = votes.share_text("" if meeting is None else meeting.text(), group)
    if not text:
        return board
    whole_job = dist.is_initialized() and size == dist.get_world_size()
    alive = _alive(group)
    heartbeat: Heartbeat
    if meeting is not None:
        heartbeat = Hub(size, meeting, board=board, whole_job=whole_job, alive=alive)
    else:
        heartbeat = Spoke(Meeting.from_text(text), board=board, size=size, whole_job=whole_job, alive=alive)
    ending.say_goodbye_of(heartbeat)
    heartbeat.start()
    return board


class _alive:  # noqa: N801  # a function with a memory
    """Whether a group still exists, and was not destroyed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._registered = _is_registered(group)

    def __call__(self) -> bool:
        group = self._group()
        return group is not None and (not self._registered or _is_registered(group))


def _is_registered(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_backend(group)
    except (RuntimeError, ValueError, AssertionError):
        return False
    return True
