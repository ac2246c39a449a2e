"""Start the heartbeat of a process group: the ranks agree on an endpoint, and each starts its thread."""

from __future__ import annotations

import sys
import weakref
from functools import partial

import torch.distributed as dist

from dpfuse.comm import votes
from dpfuse.comm.collective import is_registered
from dpfuse.comm.waiting import Board, board_of, interruptible_devices, put_board
from dpfuse.liveness import process_exit
from dpfuse.liveness.client import HeartbeatClient
from dpfuse.liveness.endpoint import Endpoint, host_id, open_endpoint
from dpfuse.liveness.heartbeat import Heartbeat
from dpfuse.liveness.server import HeartbeatServer

__all__ = ["start_heartbeat"]


def start_heartbeat(group: dist.ProcessGroup, stall_timeout: float) -> Board:
    """Start the heartbeat of a group, unless it has one, and return its board; to be called on all its ranks.

    A group of one rank gets a board, but no heartbeat. So does a group whose first rank cannot listen; it prints why.
    `stall_timeout` is that of the wrapper that is being made, in seconds.
    """
    board = board_of(group)
    if board is not None:
        return board
    rank, size = group.rank(), group.size()
    board = Board(rank, interruptible_devices(group), stall_timeout)
    put_board(group, board)
    if size == 1:
        return board
    board.one_machine = len(set(votes.gather_texts(host_id(), group))) == 1
    endpoint = None
    if rank == 0:
        try:
            endpoint = open_endpoint(one_host=board.one_machine)
        except OSError as error:
            print(f"dpfuse: no heartbeat, so ranks that end or stall will not be named: {error}", file=sys.stderr)
    text = votes.share_text("" if endpoint is None else endpoint.text(), group)
    if not text:
        return board
    whole_job = dist.is_initialized() and size == dist.get_world_size()
    alive = partial(_exists, weakref.ref(group), is_registered(group))
    heartbeat: Heartbeat
    if endpoint is not None:
        heartbeat = HeartbeatServer(size, endpoint, board=board, whole_job=whole_job, alive=alive)
    else:
        endpoint = Endpoint.from_text(text)
        heartbeat = HeartbeatClient(endpoint, board=board, size=size, whole_job=whole_job, alive=alive)
    process_exit.announce_by(heartbeat)
    heartbeat.start()
    return board


def _exists(group: weakref.ref[dist.ProcessGroup], registered: bool) -> bool:
    """Whether a group still exists and was not destroyed; `registered`: torch knew it at the start."""
    found = group()
    return found is not None and (not registered or is_registered(found))
