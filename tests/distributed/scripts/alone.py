"""A job in which rank 0 alone runs a collective between two steps, or raises, so that every rank raises.

Nothing is caught.

Usage: alone.py <call> <face> [how]: how the two ranks are started, "fork" or "spawn" of multiprocessing, "dpfuse" for
`dpfuse.spawn`; without it this is one rank, with torch's variables. Prints `raised=<seconds since the epoch>` per rank.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.distributed.processes import free_port

STALL = 1.5  # seconds


def train(call: str, face: str) -> None:
    """Train six steps; prints when an exception comes out."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    net = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 30), nn.Linear(30, 5))
    model = getattr(dpfuse, face)(net, stall_timeout=STALL)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    calls = {
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(torch.ones(7), 1),
        "other group": lambda: dist.all_reduce(torch.ones(7), group=group),
        "average by hand": lambda: dpfuse.fused_allreduce_gradients(net.parameters()),
        "weights": lambda: model.synchronize_weights(),
        "raise": lambda: int("planted"),
    }
    try:
        for step in range(6):
            model(torch.ones(4, 20)).sum().backward()
            optimizer.step()
            if step == 2 and rank == 0:
                calls[call]()
    except Exception:
        print(f"raised={time.time()}", flush=True)
        raise
    print("well", flush=True)


def of_rank(rank: int, port: int, call: str, face: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(call, face)


def main() -> None:
    call, face, *how = sys.argv[1:]
    if not how:
        train(call, face)
    elif how == ["dpfuse"]:
        dpfuse.spawn(train, args=(call, face), nprocs=2, backend="gloo")
    else:
        context = multiprocessing.get_context(how[0])
        port = free_port()
        ranks = [context.Process(target=of_rank, args=(rank, port, call, face)) for rank in (0, 1)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        sys.exit(max(each.exitcode or 0 for each in ranks))


if __name__ == "__main__":
    main()
