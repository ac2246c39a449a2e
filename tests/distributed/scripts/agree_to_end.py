"""Ranks that train until one of them is told to end by SIGUSR1 or SIGTERM; then all save, and end well."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import dpfuse.job as distributed

told = torch.zeros(1)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: told.fill_(1))
distributed.init_parallel_env()
sys.stdout.write(f"pid={os.getpid()}\n")
sys.stdout.flush()
while True:
    anywhere = told.clone()
    dist.all_reduce(anywhere)
    if anywhere.item():
        break
    time.sleep(0.02)
time.sleep(1)
print(f"rank {dist.get_rank()} saved", flush=True)
dist.barrier()
