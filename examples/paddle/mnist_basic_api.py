"""MNIST's network with a hand-written loop: the basic-API program of "single-machine multi-card training".

    python -m dpfuse.launch --nproc_per_node 2 examples/paddle/mnist_basic_api.py

The three changes of the document are marked [1] to [3]. [4] is our own: with the plain loader of the document every
rank trains on all pictures, and an epoch on two ranks takes as long as on one.
"""

from __future__ import annotations

import argparse

import mnist
import torch
import torch.nn.functional as F
from report import fingerprint, say

import dpfuse.paddle as paddle
import dpfuse.paddle.distributed as dist  # [1]
from dpfuse.paddle.io import DataLoader, DistributedBatchSampler


def train(options: argparse.Namespace) -> None:
    train_data, _ = mnist.datasets(options)
    dist.init_parallel_env()  # [2]
    device = dist.ParallelEnv().device_type

    model = mnist.network().to(device)
    model = paddle.DataParallel(model)  # [3]
    model.train()
    optimizer = torch.optim.Adam(model.parameters())

    sampler = DistributedBatchSampler(train_data, batch_size=32, shuffle=True)  # [4]
    loader = DataLoader(train_data, batch_sampler=sampler)

    for epoch in range(options.epochs):
        for pictures, labels in loader:
            pictures, labels = pictures.to(device), labels.to(device)
            predictions = model(pictures)
            loss = F.cross_entropy(predictions, labels)
            accuracy = paddle.metric.accuracy(predictions, labels)

            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        say(f"epoch {epoch}, loss {loss.item():.4f}, accuracy {accuracy.item():.4f}")
    say(f"weights {fingerprint(model)}")


if __name__ == "__main__":
    train(mnist.parser("Train on Fashion-MNIST with the basic API.").parse_args())
