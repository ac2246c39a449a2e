"""Ranks that train until one of them gets SIGUSR1 or SIGTERM; then all stop in the same step, and end well.

Argument: how many workers the loader of each rank has.
"""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader

import dpfuse

dpfuse.init_parallel_env()
dpfuse.stop_on_signals()
model = dpfuse.DataParallel(torch.nn.Linear(1, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(torch.zeros(100_000, 1), batch_size=4, num_workers=int(sys.argv[1]))
for step, batch in enumerate(loader):
    model(batch).square().sum().backward()
    optimizer.step()
    if model.stop_requested:
        break
    if step == 2:
        sys.stdout.write(f"pid={os.getpid()}\n")
        sys.stdout.flush()
    time.sleep(0.01)
time.sleep(1)  # of saving
# Where Python buffers nothing, print() writes a line and its end apart, and the other rank may write between them.
sys.stdout.write(f"rank {dpfuse.get_rank()} stopped in step {step}: {model.stop_reason}\n")
sys.stdout.flush()
