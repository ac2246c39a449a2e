"""Numbers that ranks compare and that differ only in their high bits: every rank raises. Equal ones are silent."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}
PAIRS = [(1, 65), (64, 128), (63, 127), (1, 17), (16, 48), (2, 258), (1, 1025)]


def wrapped(face="dp", **options):
    torch.manual_seed(0)
    return FACES[face](nn.Linear(3, 1), **options)


def batch(rank, number):
    return torch.full((2, 3), 0.25 * (rank + 1)) + number % 7


def window(model, rank, count):
    """One step of so many batches."""
    for number in range(count):
        with model.no_sync() if number < count - 1 else nullcontext():
            model(batch(rank, number)).sum().backward()


def right_step(model, rank, size, count=2):
    """A step of all ranks beside torch's class."""
    bare = copy.deepcopy(model.module)
    theirs = TorchDDP(bare)
    theirs.zero_grad()
    window(theirs, rank, count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad()
        window(model, rank, count)
    for ours, other in zip(model.module.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_windows_of_other_lengths_are_an_error_on_every_rank(rank, size, pair, face):
    model = wrapped(face)
    right_step(model, rank, size)
    model.zero_grad()
    expected = f"rank 1 has run {pair[1]} backwards since the last averaged one, rank 0 has run {pair[0]} backward"
    with pytest.raises(dpfuse.DPFuseError, match=f"^rank {rank}: {expected}") as error:
        window(model, rank, pair[rank])
    assert "No rank's gradients of this backward are averaged" in str(error.value)
    right_step(model, rank, size)


@pytest.mark.ranks(size=3)
def test_the_last_of_three_ranks_is_named(rank, size):
    model = wrapped(accumulate_in_buckets=True)
    with pytest.raises(dpfuse.DPFuseError, match=rf"^rank {rank}: rank 2 has run 100 backwards .* rank 0 has run 36 "):
        window(model, rank, 100 if rank == 2 else 36)


@pytest.mark.parametrize("face", FACES)
def test_windows_of_as_many_batches_say_nothing(rank, size, face):
    model = wrapped(face)
    for count in (1, 63, 64, 65, 127, 128, 129):
        right_step(model, rank, size, count)


@pytest.mark.parametrize("extra", [64, 65, 128], ids=str)
def test_forwards_without_a_backward_are_an_error_on_every_rank(rank, size, extra):
    model = wrapped()
    right_step(model, rank, size)
    for number in range(1 + extra * rank):
        model(batch(rank, number))
    with pytest.raises(dpfuse.DPFuseError, match=f"rank 1 has run {1 + extra} forwards without a backward, rank 0 "):
        model(batch(rank, 0)).sum().backward()
    right_step(model, rank, size)


def test_steps_of_micro_batches_that_are_far_apart_are_an_error_on_every_rank(rank, size):
    for apart in (1, 64, 1 << 24, 1 << 32, 1 << 40):
        model = wrapped(fixed_micro_batches=2)
        text = f"rank 1 averages the micro-batches of step {3 + apart}, rank 0 averages the micro-batches of step 3;"
        with pytest.raises(dpfuse.DPFuseError, match=text):
            for number in model.micro_batches(step=3 + apart * rank):
                model(batch(0, number)).sum().backward()
        model.zero_grad()
        for number in model.micro_batches(step=4 + apart):
            model(batch(0, number)).sum().backward()


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = x * layer
        return x


# Their hashes were equal in 16 bits.
@pytest.mark.parametrize("sets", [((0, 3, 6), (0, 6, 10)), ((0, 7, 11), (2, 3, 9)), ((1, 2, 3, 8), (1, 7, 8, 11))])
@pytest.mark.parametrize("face", FACES)
def test_other_frozen_parameters_are_an_error_on_every_rank(rank, size, face, sets):
    model = FACES[face](Chain())
    model(torch.ones(())).backward()
    for index in sets[rank]:
        model.module.layers[index].requires_grad_(False)
    model.zero_grad()
    with pytest.raises(dpfuse.DPFuseError, match=r"the ranks have frozen different parameters .*(3, 3|4, 4) of them"):
        model(torch.ones(())).backward()


# The sums of their checksums were equal in 12 bits.
@pytest.mark.parametrize("sets", [((0, 12), (2, 10)), ((2, 18), (3, 19)), ((0, 14), (4, 10))])
def test_other_reset_states_are_an_error_on_every_rank(rank, size, sets):
    layers = [nn.Linear(2, 2, bias=False) for _ in range(20)]
    model = dpfuse.DataParallel(nn.Sequential(*layers))
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=1e-3, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for number in sets[rank]:
        optimizer.state.pop(layers[number].weight, None)
    with pytest.raises(dpfuse.DPFuseError, match="rank 1 has reset other states of its ShardedOptimizer"):
        model(torch.ones(1, 2)).sum().backward()
