"""A training goes on from a checkpoint on any number of ranks, with the bits of one that nothing interrupted."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.model import machine_kind

COUNT = 6


def made(sharded):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    net = nn.Sequential(nn.Linear(12, 30), nn.Dropout(0.3), nn.ReLU(), nn.Linear(30, 7))
    model = dpfuse.DataParallel(net, fixed_micro_batches=COUNT, comm_buffer_size=0.0005)
    if sharded:
        matrices = [param for param in net.parameters() if param.dim() == 2]
        rest = [param for param in net.parameters() if param.dim() != 2]
        groups = [{"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02}, {"params": rest, "lr": 0.01}]
        optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, params=groups)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def train(rank, size, folder, sharded, begin, end):
    """Go on from what is in the folder, if anything is there, and return all bits of the training, on the first rank.

    What a step draws outside of its micro-batches is used, too: it must be the same on all ranks.
    """
    model, optimizer = made(sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dpfuse.load_checkpoint(folder, model, optimizer)
    assert found.step == begin
    for _ in range(begin, end):
        drawn = torch.rand(1).item() + random.random() + np.random.rand()
        for number in model.micro_batches():
            inputs = torch.rand(4, 12) + 0.01 * number + drawn
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dpfuse.save_checkpoint(folder, model, optimizer, step=end)
    states = optimizer.state_dict()["state"]
    tensors = [*model.module.parameters(), *(s[k] for _, s in sorted(states.items()) for k in sorted(s))]
    return [torch.as_tensor(each).tolist() for each in tensors], drawn


@pytest.mark.parametrize("sharded", [False, True], ids=["AdamW", "Muon and AdamW, sharded"])
def test_the_number_of_ranks_changes_three_times(ranks, tmp_path, sharded):
    (whole,) = ranks(train, str(tmp_path / "whole"), sharded, 0, 12, size=1)
    begin, told = 0, []
    for size in (2, 3, 1, 4):
        told = ranks(train, str(tmp_path / "parts"), sharded, begin, begin + 3, size=size)
        begin += 3
        assert all(each == told[0] for each in told)
    assert told[0] == whole


def saved(folder, **options):
    model = dpfuse.DataParallel(nn.Linear(3, 2), fixed_micro_batches=COUNT)
    dpfuse.save_checkpoint(folder, model, step=0)
    other = dpfuse.DataParallel(nn.Linear(3, 2), **options)
    before = [param.tolist() for param in other.parameters()]
    return other, before


def test_another_number_of_micro_batches_is_refused_and_nothing_is_loaded(group, tmp_path):
    model, before = saved(tmp_path, fixed_micro_batches=COUNT + 1)
    with pytest.raises(ValueError, match=r"fixed_micro_batches=6.*wrapped with 7"):
        dpfuse.load_checkpoint(tmp_path, model)
    assert [param.tolist() for param in model.parameters()] == before


def test_another_number_of_threads_is_refused(group, tmp_path, monkeypatch):
    dpfuse.save_checkpoint(tmp_path, dpfuse.DataParallel(nn.Linear(3, 2), fixed_micro_batches=COUNT), step=0)
    monkeypatch.setenv("DPFUSE_THREADS", "2")
    model = dpfuse.DataParallel(nn.Linear(3, 2), fixed_micro_batches=COUNT)
    with pytest.raises(ValueError, match=r"1 threads.*has 2.*DPFUSE_THREADS=1"):
        dpfuse.load_checkpoint(tmp_path, model)
    torch.set_num_threads(1)


def test_a_machine_of_another_kind_is_told_by_name(group, tmp_path, monkeypatch):
    model, _ = saved(tmp_path, fixed_micro_batches=COUNT)
    monkeypatch.setattr(machine_kind, "_processor", lambda: "another processor")
    with pytest.warns(UserWarning, match=r"another kind.*processor.*another processor"):
        dpfuse.load_checkpoint(tmp_path, model)


def test_files_with_and_without_micro_batches_can_be_loaded_by_the_others(group, tmp_path):
    model, _ = saved(tmp_path / "fixed")
    assert dpfuse.load_checkpoint(tmp_path / "fixed", model).path is not None
    dpfuse.save_checkpoint(tmp_path / "usual", model, step=4)
    other = dpfuse.DataParallel(nn.Linear(3, 2), fixed_micro_batches=COUNT)
    assert dpfuse.load_checkpoint(tmp_path / "usual", other).step == 4
