"""One rank of a job in which something goes wrong: what, and on which rank, is the first argument.

Usage: stall.py <what> <stall_timeout>, with torch's variables. Prints `pid=…` before the loop and `step n` after each
step; at the end `DPFuseError after … s: …` where there was one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dpfuse
from dpfuse.comm.waiting import board_of, leave
from tests.distributed.scripts.lame_group import join_lame_group

STEPS = int(os.environ.get("STEPS", "6"))
WHEN = 3  # the step in which it goes wrong, from 0

what, stall_timeout = sys.argv[1], float(sys.argv[2])
rank = int(os.environ["RANK"])
lame = what.startswith("lame")
group = join_lame_group() if lame else dist.init_process_group("gloo")


class Probe(nn.Module):
    """Calls what it is given in forward, and again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.in_forward: Any = None
        self.in_backward: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_forward:
            self.in_forward()
        x = x * self.weight
        if self.in_backward:
            x.register_hook(lambda _: self.in_backward())
        return x


def evaluate(seconds: float) -> None:
    time.sleep(seconds)


def fail() -> None:
    raise ValueError("planted")


probe = Probe()
net = nn.Sequential(nn.Linear(8, 8), probe, nn.BatchNorm1d(8), nn.Linear(8, 8))
options: dict[str, Any] = {"stall_timeout": stall_timeout}
if what.startswith(("hook", "ahead")):
    model = dpfuse.DistributedDataParallel(net, bucket_cap_mb=0, **options)
    if what != "ahead":
        model.register_comm_hook(None, allreduce_hook)
else:
    model = dpfuse.DataParallel(net, comm_buffer_size=0, last_comm_buffer_size=0, **options)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
faulty = rank == int(os.environ.get("FAULTY", "1"))
print(f"pid={os.getpid()}", flush=True)
begin = time.monotonic()
try:
    for step in range(STEPS):
        if step == WHEN and lame:
            group.lame = True
            if faulty:
                os.kill(os.getpid(), signal.SIGSTOP if what == "lame-freeze" else signal.SIGKILL)
        if step == WHEN and faulty:
            if what == "kill":
                probe.in_backward = lambda: os.kill(os.getpid(), signal.SIGKILL)
            elif what in ("raise", "hook-raise"):
                probe.in_forward = fail
            elif what in ("freeze", "hook-freeze"):
                probe.in_backward = lambda: os.kill(os.getpid(), signal.SIGSTOP)
            elif what.startswith("hold"):
                ctypes.PyDLL(None).usleep(int(float(what[4:]) * 1e6))  # with Python's lock
            elif what.startswith("evaluate"):
                evaluate(float(what[8:]))
            elif what == "leave":
                break
            elif what == "leave-group":
                leave(board_of(dist.group.WORLD), RuntimeError("planted"))
                time.sleep(5)  # the process lives, and joins no collective
                break
            elif what == "ahead":
                model(torch.ones(4, 8))  # its buffers meet the other rank's gradients
            elif what == "barrier":
                dist.barrier()
            elif what == "exit":
                sys.exit(7)
        begin = time.monotonic()
        model(torch.ones(4, 8)).sum().backward()
        if lame and group.lame:
            time.sleep(40)  # as in reading the loss from the device
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}", flush=True)
        time.sleep(float(os.environ.get("PAUSE", "0.01")))
except dpfuse.DPFuseError as error:
    print(f"DPFuseError after {time.monotonic() - begin:.1f} s: {error}", flush=True)
    raise
finally:
    if what == "destroy" or os.environ.get("DESTROY"):
        dist.destroy_process_group()
print("well", flush=True)
