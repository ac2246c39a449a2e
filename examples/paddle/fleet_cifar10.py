"""CIFAR-10 with fleet: the program of the quick start to collective training.

    python -m dpfuse.launch --nproc_per_node 2 examples/paddle/fleet_cifar10.py

It reads the binary version of CIFAR-10 from `--data` (the folder or the archive), or from cifar-10-batches-bin in the
folder DPFUSE_DATA or data/. Without these files, it uses a few made-up pictures. The five steps of the document are
marked [1] to [5]. Plain `python` runs it on one process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import cifar10
import torch
import torch.nn.functional as F
from report import fingerprint, say
from torch import nn

import dpfuse.paddle as paddle
import dpfuse.paddle.distributed as dist
from dpfuse.paddle.distributed import fleet  # [1]
from dpfuse.paddle.io import DataLoader, DistributedBatchSampler

BATCH_SIZE = 32
LEARNING_RATE = 0.001


class MyNet(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, kernel_size=3)
        self.pool1 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.pool2 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.conv3 = nn.Conv2d(64, 64, kernel_size=3)
        self.flatten = nn.Flatten()
        self.linear1 = nn.Linear(1024, 64)
        self.linear2 = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool1(F.relu(self.conv1(x)))
        x = self.pool2(F.relu(self.conv2(x)))
        x = self.flatten(F.relu(self.conv3(x)))
        return self.linear2(F.relu(self.linear1(x)))


def train(train_data: cifar10.Cifar10, test_data: cifar10.Cifar10, epochs: int) -> None:
    fleet.init(is_collective=True)  # [2]
    device = dist.ParallelEnv().device_type

    model = MyNet(cifar10.CLASSES).to(device)
    model = fleet.distributed_model(model)  # [3]
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    optimizer = fleet.distributed_optimizer(optimizer)  # [4]

    # [5] The pictures are in memory, so no worker needs to read ahead.
    train_sampler = DistributedBatchSampler(train_data, BATCH_SIZE, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_data, batch_sampler=train_sampler)
    test_sampler = DistributedBatchSampler(test_data, BATCH_SIZE)
    test_loader = DataLoader(test_data, batch_sampler=test_sampler)

    for epoch in range(epochs):
        model.train()
        for pictures, labels in train_loader:
            loss = F.cross_entropy(model(pictures.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()

        model.eval()
        right = seen = 0.0
        with torch.no_grad():
            for pictures, labels in test_loader:
                logits = model(pictures.to(device))
                right += len(labels) * paddle.metric.accuracy(logits, labels.to(device)).item()
                seen += len(labels)
        say(f"epoch {epoch}, loss {loss.item():.4f}, accuracy {right / seen:.4f}")
    say(f"weights {fingerprint(model)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on CIFAR-10 with fleet.")
    parser.add_argument("--data", type=Path, help=f"the folder {cifar10.FOLDER}, or cifar-10-binary.tar.gz")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, help="use only so many pictures to train (32 a rank at least) and to test")
    options = parser.parse_args()

    home = os.environ.get("DPFUSE_DATA") or Path(__file__).resolve().parents[2] / "data"
    place = options.data or Path(home, cifar10.FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None and not place.exists():
            place = Path(folder)
            cifar10.write_made_up(place)
            print("CIFAR-10 is not on this disk: training on made-up pictures\n", end="")
        data = [cifar10.Cifar10(place, mode, options.limit) for mode in ("train", "test")]
    train(*data, epochs=options.epochs)


if __name__ == "__main__":
    main()
