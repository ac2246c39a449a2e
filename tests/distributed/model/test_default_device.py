"""Training where the program has set another default device for new tensors: `torch.set_default_device`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse

NOWHERE = torch.device("meta")  # a tensor that is made there by mistake has no numbers
FACES = {
    "views": dpfuse.DataParallel,
    "torch's face": dpfuse.DistributedDataParallel,
    "bfloat16": lambda module: dpfuse.DataParallel(module, wire_dtype=torch.bfloat16),
    "float8": lambda module: dpfuse.DataParallel(module, wire_dtype=torch.float8_e4m3fn),
    "deterministic": lambda module: dpfuse.DataParallel(module, deterministic=True),
    "unused": lambda module: dpfuse.DataParallel(module, find_unused_parameters=True),
    "in buckets": lambda module: dpfuse.DataParallel(module, accumulate_in_buckets=True),
    "training": lambda module: dpfuse.DataParallel(module, check_training="raise"),
    "replicate": dpfuse.replicate,
}


def net(sparse=False):
    torch.manual_seed(0)
    with torch.device("cpu"):
        return nn.Sequential(nn.Embedding(7, 6, sparse=sparse), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def batch(rank, step):
    return torch.arange(step + rank, step + rank + 6, device="cpu") % 7


def train(model, rank, optimizer=None, steps=10):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def same(found, expected):
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("face", FACES)
def test_training_is_the_same_bit_for_bit(rank, size, face):
    expected = train(FACES[face](net()), rank)
    with NOWHERE:
        found = train(FACES[face](net()), rank)
    assert same(found, expected)


def test_sparse_gradients_are_averaged(rank, size):
    expected = train(dpfuse.DataParallel(net(sparse=True)), rank)
    with NOWHERE:
        found = train(dpfuse.DataParallel(net(sparse=True)), rank)
    assert same(found, expected)


def test_gradients_are_averaged_by_hand(rank, size):
    module = net()
    with NOWHERE:
        for step in range(3):
            module(batch(rank, step)).square().mean().backward()
            dpfuse.fused_allreduce_gradients(list(module.parameters()), None)
    expected = net()
    for step in range(3):
        expected(batch(rank, step)).square().mean().backward()
        dpfuse.fused_allreduce_gradients(list(expected.parameters()), None)
    assert same([p.grad for p in module.parameters()], [p.grad for p in expected.parameters()])


def test_sharded_states_are_saved_and_loaded(rank, size, tmp_path):
    def sharded(model):  # SGD, since others make their counter of steps on the default device
        return dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.01, momentum=0.9)

    def trained():
        model = dpfuse.DataParallel(net())
        optimizer = sharded(model)
        train(model, rank, optimizer, 3)
        dpfuse.save_checkpoint(tmp_path, model, optimizer, step=3)
        again = dpfuse.DataParallel(net())
        optimizer = sharded(again)
        dpfuse.load_checkpoint(tmp_path, again, optimizer)
        return train(again, rank, optimizer, 3)

    expected = trained()
    with NOWHERE:
        found = trained()
    assert same(found, expected)
