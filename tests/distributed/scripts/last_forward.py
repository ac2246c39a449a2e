"""Arguments: a folder, a rank of two. Rank 0 ends right after a forward that sends buffers, rank 1 comes later."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dpfuse

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
model = dpfuse.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), broadcast_buffers=True)
with torch.no_grad():
    model.module[1].running_mean.fill_(10.0 - rank)
model(torch.ones(8, 3)).sum().backward()
model(torch.ones(8, 3))  # no backward follows, so the next forward sends buffers
model.module[1].running_mean.fill_(20.0 - rank)
if rank:
    while not (folder / "ending").exists():
        time.sleep(0.01)
    time.sleep(0.5)
model(torch.ones(8, 3))
assert model.module[1].running_mean.min() > 17, model.module[1].running_mean
(folder / "ending").touch()
