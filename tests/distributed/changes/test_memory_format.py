"""A parameter that gets other strides after wrapping: gradients travel in the order of its memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse import DPFuseError

FACES = {"paddle": dpfuse.DataParallel, "torch": dpfuse.DistributedDataParallel}


def wrapped(face, rank):
    torch.manual_seed(0)
    model = FACES[face](nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)))
    return model, torch.Generator().manual_seed(rank)


def convert(model):
    weight = model.module[0].weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("face", FACES)
def test_on_one_rank_it_is_an_error_of_all_and_undone_it_trains(rank, size, face, before):
    # torch's class adds up elements of different places without a word.
    model, generator = wrapped(face, rank)
    for _ in range(before):
        model(torch.randn(2, 3, 4, 4, generator=generator)).square().mean().backward()
        model.zero_grad()
    if rank == 0:
        convert(model)
    loss = model(torch.randn(2, 3, 4, 4, generator=generator)).square().mean()
    words = "the module was changed on rank 0 of 2"
    with pytest.raises(DPFuseError, match=words) as caught:
        loss.backward()
    if rank == 0:
        assert "'0.weight' was converted from float32 (4, 3, 3, 3) on cpu to float32 (4, 3, 3, 3) on cpu with its " in (
            str(caught.value)
        )
        assert "dimensions in the order (0, 2, 3, 1)" in str(caught.value)
        model.module[0].weight.data = model.module[0].weight.data.contiguous()
    model.zero_grad()
    model(torch.randn(2, 3, 4, 4, generator=generator)).square().mean().backward()


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("face", FACES)
def test_on_all_ranks_the_mean_is_right_and_has_the_new_strides(rank, size, face, before):
    model, _ = wrapped(face, rank)
    for step in range(before + 3):
        if step == before:
            convert(model)
        batches = [torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(size)]
        means = [torch.zeros_like(param, dtype=torch.float64) for param in model.module.parameters()]
        for batch in batches:
            losses = model.module(batch).square().mean()
            for mean, grad in zip(means, torch.autograd.grad(losses, [*model.module.parameters()]), strict=True):
                mean += grad.double() / size
        model(batches[rank]).square().mean().backward()
        for param, mean in zip(model.module.parameters(), means, strict=True):
            torch.testing.assert_close(param.grad.double(), mean, rtol=1e-5, atol=1e-7)
            assert step < before or param.grad.stride() == param.stride()
        model.zero_grad()
