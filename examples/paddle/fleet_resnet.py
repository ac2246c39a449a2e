"""ResNet-50 with fleet on random pictures: the program of "principles and practice of data parallelism".

    python -m dpfuse.launch --nproc_per_node 2 examples/paddle/fleet_resnet.py

It is small by default, for a CPU. On noise, with a learning rate for large batches, its loss rises. To run it in the
size of the document:

    python -m dpfuse.launch --gpus 0,1 examples/paddle/fleet_resnet.py \
        --image-size 224 --batch-size 32 --batch-num 100 --epochs 10
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from report import fingerprint, say
from resnet import LAYERS, ResNet

import dpfuse.paddle as paddle
from dpfuse.paddle.distributed import ParallelEnv, fleet, get_rank
from dpfuse.paddle.io import DataLoader, Dataset, DistributedBatchSampler

BASE_LR = 0.1
MOMENTUM_RATE = 0.9
L2_DECAY = 1e-4
CLASS_DIM = 102


class RandomDataset(Dataset[tuple[np.ndarray, int]]):
    """New noise at each access: there is nothing to learn, only to compute."""

    def __init__(self, num_samples: int, image_size: int) -> None:
        self.num_samples = num_samples
        self.image_size = image_size

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image = np.random.random([3, self.image_size, self.image_size]).astype("float32")
        return image, np.random.randint(CLASS_DIM)

    def __len__(self) -> int:
        return self.num_samples


def train_model(options: argparse.Namespace) -> None:
    fleet.init(is_collective=True)
    device = ParallelEnv().device_type

    model = ResNet(options.depth, CLASS_DIM).to(device)
    # Paddle's Momentum with L2Decay.
    optimizer = torch.optim.SGD(model.parameters(), BASE_LR, momentum=MOMENTUM_RATE, weight_decay=L2_DECAY)
    optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(model)

    dataset = RandomDataset(options.batch_num * options.batch_size, options.image_size)
    sampler = DistributedBatchSampler(
        dataset, rank=get_rank(), batch_size=options.batch_size, shuffle=False, drop_last=True
    )
    train_loader = DataLoader(dataset, batch_sampler=sampler, num_workers=options.num_workers)

    for epoch in range(options.epochs):
        model.train()
        for batch_id, (image, label) in enumerate(train_loader):
            image, label = image.to(device), label.to(device)
            out = model(image)
            loss = F.cross_entropy(out, label)
            acc_top1 = paddle.metric.accuracy(out, label, k=1)
            acc_top5 = paddle.metric.accuracy(out, label, k=5)

            loss.backward()
            optimizer.step()
            model.clear_gradients()

            if batch_id % 5 == 0:
                accuracies = f"acc1 {acc_top1.item():.5f}, acc5 {acc_top5.item():.5f}"
                say(f"epoch {epoch}, batch {batch_id} of {len(sampler)}, loss {loss.item():.5f}, {accuracies}")
    say(f"weights {fingerprint(model)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a ResNet on random pictures with fleet.")
    parser.add_argument("--depth", type=int, choices=LAYERS, default=50)
    parser.add_argument("--image-size", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--batch-size", type=int, default=8, help="pictures of each rank's batch")
    parser.add_argument("--batch-num", type=int, default=12, help="batches of all ranks together in an epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that make pictures for each rank")
    train_model(parser.parse_args())
