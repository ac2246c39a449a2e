"""A script around a trainer object, in the shape of transformers: sampler, schedule, loader, checkpoint."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from weights import show


class Trainer:
    def __init__(self, model, data, args):
        self.args = args
        self.wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.sampler = DistributedSampler(data, seed=args.seed)
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler, num_workers=args.workers)

    def train(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                self.training_step(inputs, targets)
            self.schedule.step()
            self.save()

    def training_step(self, inputs, targets):
        loss = nn.functional.cross_entropy(self.wrapped(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self):
        if dist.get_rank() == 0 and self.args.out:
            torch.save(self.wrapped.state_dict(), os.path.join(self.args.out, "checkpoint.pt"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 3))
    torch.manual_seed(args.seed + 1 + dist.get_rank())
    Trainer(model, data, args).train()
    show(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
