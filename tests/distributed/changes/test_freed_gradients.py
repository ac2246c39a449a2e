"""Gradients whose memory a program frees or moves: with views of a bucket, that is the memory of the whole bucket."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.changes.test_changed_in_place import Net, check, factor_of, train


def free(storage, size):
    storage.resize_(0)


def free_and_take_again(storage, size):
    storage.resize_(0)
    storage.resize_(size)


def shrink(storage, size):
    storage.resize_(size // 2)


def enlarge(storage, size):
    storage.resize_(size + 64)


WAYS = {
    "views": {},
    "several buckets": {"comm_buffer_size": 0.0001, "last_comm_buffer_size": 0.0001},
    "deterministic": {"deterministic": True},
    "accumulating": {"accumulate_in_buckets": True},
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["small", "large"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks_that_change", [(0, 1), (1,)], ids=str)
@pytest.mark.parametrize("change", [free, free_and_take_again, shrink, enlarge], ids=lambda one: one.__name__)
def test_the_next_backward_has_memory_again(rank, size, change, ranks_that_change, way, large):
    model = dpfuse.DataParallel(Net(large), **WAYS[way])
    for step in range(6):
        train(model, rank, step)
        check(model, size, step)
        if step in (1, 2, 4) and rank in ranks_that_change:
            for param in list(model.parameters())[:: 1 if step == 2 else 3]:
                storage = param.grad.untyped_storage()
                change(storage, storage.nbytes())
        model.zero_grad()


@pytest.mark.parametrize("ranks_that_change", [(0, 1), (1,)], ids=str)
def test_a_freed_gradient_that_is_kept_counts_as_zeros(rank, size, ranks_that_change):
    """Torch itself would add to memory that is not there."""
    model = dpfuse.DataParallel(Net())
    for step in range(5):
        train(model, rank, step)
        check(model, size, step)
        if step == 2 and rank in ranks_that_change:
            free(model.module.square.grad.untyped_storage(), 0)
        else:
            model.zero_grad(set_to_none=False)


def test_windows_of_several_backwards(rank, size):
    model = dpfuse.DataParallel(Net())
    for step in range(5):
        with model.no_sync():
            train(model, rank, step)
        train(model, rank, step)
        check(model, size, step, times=2)
        free(model.module.square.grad.untyped_storage(), 0)
        model.zero_grad()


def test_memory_is_freed_until_the_next_backward(rank, size):
    """The program has what it asked for."""
    model = dpfuse.DataParallel(nn.Linear(64, 64))
    model(torch.full((2, 64), factor_of(rank, 0))).sum().backward()
    storage = model.module.weight.grad.untyped_storage()
    free(storage, 0)
    model.zero_grad()
    model(torch.ones(2, 64))
    assert storage.nbytes() == 0
