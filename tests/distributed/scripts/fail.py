"""Fails on rank 1 in the way that the argument names, while rank 0 waits in a collective (or sleeps)."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import dpfuse.job as distributed

distributed.init_parallel_env()
sys.stdout.write(f"pid={os.getpid()}\n")
sys.stdout.flush()
dist.barrier()
how = sys.argv[1]
if distributed.get_rank() == 1:
    if how in ("raise", "raise-while-peer-sleeps"):
        raise ValueError("planted")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(4)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
if how in ("raise-while-peer-sleeps", "sleep"):
    time.sleep(120)
while how == "loop":
    dist.all_reduce(torch.zeros(1))
    time.sleep(0.05)
dist.all_reduce(torch.zeros(1))
