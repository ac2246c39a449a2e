"""A momentum encoder in the shape of MoCo: it starts its own ranks with torch.multiprocessing.spawn."""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from weights import show


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 48), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, one, other):
        query = F.normalize(self.query(one))
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            key = F.normalize(self.key(other))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()], 1) / 0.2
        with torch.no_grad():
            keys = [torch.empty_like(key) for _ in range(dist.get_world_size())]
            dist.all_gather(keys, key)
            keys, place = torch.cat(keys), int(self.place)
            self.queue[:, place : place + len(keys)] = keys.t()
            self.place[0] = (place + len(keys)) % self.queue.shape[1]
        return logits, torch.zeros(len(logits), dtype=torch.long)


def work(rank, size, port, steps):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(Pair())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(20 + rank)
    for _ in range(steps):
        batch = torch.randn(4, 10)
        loss = F.cross_entropy(*model(batch + 0.1 * torch.randn(4, 10), batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    size, port, steps = map(int, sys.argv[1:])
    mp.spawn(work, (size, port, steps), nprocs=size)
