"""A copy of a wrapper goes on where the original is: with the same seeds."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import dpfuse


def draws(model):
    """What the micro-batches of a step draw."""
    found = []
    for _ in model.micro_batches():
        found.append(torch.rand(1).item())
        model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
    return found


def moved(model):
    """Let the seed be another one than that with which it was wrapped, as after loading a checkpoint."""
    model._sync.micro_loop.seed += 1
    draws(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_the_seeds_of_the_original(group, copied):
    model = dpfuse.DataParallel(nn.Linear(3, 2), fixed_micro_batches=2)
    moved(model)
    other = copied(model)
    assert draws(other) == draws(model)
    assert draws(other) == draws(model)


def test_another_process_group_changes_no_seed(group):
    model = dpfuse.DistributedDataParallel(nn.Linear(3, 2), fixed_micro_batches=2)
    moved(model)
    expected = copy.deepcopy(model)
    model._update_process_group(torch.distributed.group.WORLD)
    assert draws(model) == draws(expected)


def test_a_copy_can_be_made_inside_of_the_last_micro_batch(group):
    model = dpfuse.DataParallel(nn.Linear(3, 2), fixed_micro_batches=2)
    for number in model.micro_batches():
        if number == 1:
            copy.deepcopy(model)
        model(torch.ones(2, 3)).sum().backward()


def test_what_was_wrapped_can_be_read_where_there_is_no_process_group(group):
    text = pickle.dumps(dpfuse.DataParallel(nn.Linear(3, 2), fixed_micro_batches=2))
    torch.distributed.destroy_process_group()
    with pytest.warns(UserWarning, match="there is no process group"):
        other = pickle.loads(text)
    assert other(torch.ones(1, 3)).shape == (1, 2)
